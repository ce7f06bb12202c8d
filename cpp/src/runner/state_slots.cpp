#include "cpp/src/runner/state_slots.h"

#include <algorithm>
#include <functional>

#include "cpp/src/check.h"

namespace deltaic {

StateSlots::StateSlots(int num_running_slots) : capacity_(num_running_slots) {
  for (int i = 0; i < capacity_; ++i) free_.push_back(i);  // ascending: a heap
}

void StateSlots::end(const std::string& req_id) {
  if (owns(req_id) && std::find(ended_.begin(), ended_.end(), req_id) == ended_.end()) ended_.push_back(req_id);
}

void StateSlots::reclaim() {
  for (const std::string& req_id : ended_) {
    const auto owner = slots_.find(req_id);
    free_.push_back(owner->second);
    std::push_heap(free_.begin(), free_.end(), std::greater<>());
    slots_.erase(owner);
  }
  ended_.clear();
}

int StateSlots::assign(const std::string& req_id) {
  DELTAIC_CHECK(!free_.empty(), "request ", req_id, " needs a state slot: ", slots_.size() + 1,
                " live sequences, state slots for ", capacity_);
  std::pop_heap(free_.begin(), free_.end(), std::greater<>());
  const int slot = free_.back();
  free_.pop_back();
  slots_.emplace(req_id, slot);
  return slot;
}

}  // namespace deltaic
