#pragma once

#include <map>
#include <string>
#include <vector>

namespace deltaic {

// Who owns which running state slots. Keyed on the request id: a request has slots_per_request slots in a row, from
// admission to its end, and they never move. The lowest free ones are handed out first.
class StateSlots {
 public:
  StateSlots(int num_running_slots, int slots_per_request);

  // The sequences that fit.
  int capacity() const { return capacity_; }
  int num_live() const { return static_cast<int>(first_slots_.size() - ended_.size()); }
  bool owns(const std::string& req_id) const { return first_slots_.contains(req_id); }

  // The request has ended or was preempted: its slots come back with the next reclaim().
  void end(const std::string& req_id);
  void reclaim();
  // Slots for a request that has none; returns the first. Throws InvalidArgument when all are taken.
  int assign(const std::string& req_id);

  // req_id -> first slot, those that wait for reclaim() included.
  const std::map<std::string, int>& first_slots() const { return first_slots_; }

 private:
  int slots_per_request_;
  int capacity_;
  std::map<std::string, int> first_slots_;
  std::vector<std::string> ended_;
  std::vector<int> free_;  // a min-heap of first slots
};

}  // namespace deltaic
