#pragma once

#include <map>
#include <string>
#include <vector>

#include <deltaic/step_hook.h>

namespace deltaic {

// Keeps a hidden state of every token of the requests that are watched, for the next stage.
class HiddenTap : public StepHook {
 public:
  // layer: as StepHook::hidden_layer; -1: the output of the final norm.
  explicit HiddenTap(int layer) : layer_(layer) {}

  void watch(const std::string& req_id) { rows_[req_id]; }
  // Unknown ids are ignored.
  void forget(const std::string& req_id) { rows_.erase(req_id); }
  // Rows of tokens [begin, ...) that were computed so far, [n, hidden_size]; none for an unknown id.
  std::vector<float> rows(const std::string& req_id, int begin) const;
  int hidden_size() const { return hidden_size_; }  // 0 before the first step

  int hidden_layer() const override { return layer_; }
  void after_forward(const StepView& step) override;

 private:
  int layer_;
  int hidden_size_ = 0;
  std::map<std::string, std::vector<float>> rows_;
};

}  // namespace deltaic
