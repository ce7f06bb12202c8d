#pragma once

#include <map>
#include <string>
#include <vector>

namespace deltaic {

// Who owns which running state slot. Keyed on the request id: a request has one slot from admission to its end, and it
// never moves. The lowest free one is handed out first.
class StateSlots {
 public:
  explicit StateSlots(int num_running_slots);

  // The sequences that fit.
  int capacity() const { return capacity_; }
  int num_live() const { return static_cast<int>(slots_.size() - ended_.size()); }
  bool owns(const std::string& req_id) const { return slots_.contains(req_id); }

  // The request has ended or was preempted: its slot comes back with the next reclaim().
  void end(const std::string& req_id);
  void reclaim();
  // A slot for a request that has none. Throws InvalidArgument when all are taken.
  int assign(const std::string& req_id);

  // req_id -> slot, those that wait for reclaim() included.
  const std::map<std::string, int>& slots() const { return slots_; }

 private:
  int capacity_;
  std::map<std::string, int> slots_;
  std::vector<std::string> ended_;
  std::vector<int> free_;  // a min-heap
};

}  // namespace deltaic
