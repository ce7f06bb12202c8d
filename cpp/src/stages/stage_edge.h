#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <deltaic/tensor.h>

namespace deltaic {

// Section and name of a value in a payload.
using PayloadKey = std::pair<std::string, std::string>;

enum class EndStatus : std::uint8_t { ok, error, cancelled };

// The last item of a request on an edge.
struct EdgeEnd {
  EndStatus status = EndStatus::ok;
  std::string error{};
};

// How an edge hands over: everything when the source has ended, or `first` rows at once and then `size` at a time.
struct EdgeMode {
  bool is_full = true;
  int first = 1;
  int size = 1;
  int left_context = 0;  // rows before a chunk that are given again, for a target without a state of its own
};

struct EdgeOptions {
  std::string name{};                      // for messages
  std::vector<PayloadKey> keys{};          // that it carries
  std::vector<PayloadKey> replace_keys{};  // of these: the latest value instead of all rows
  std::int64_t capacity = 1 << 20;         // rows of a request that may wait
  std::optional<double> deadline_s{};      // longest wait for something new of a request
};

// Rows of one key: [count, row_shape...] of one dtype.
struct EdgeRows {
  DType dtype = DType::f32;
  std::vector<std::int64_t> row_shape{};
  std::vector<std::byte> bytes{};
  std::int64_t count = 0;

  std::size_t row_bytes() const;
  template <class T>
  const T* as() const {
    return reinterpret_cast<const T*>(bytes.data());
  }
};

// What is due of a request: rows by key and the latest of all other values, or the end.
struct Delivery {
  std::string id;
  std::map<PayloadKey, EdgeRows> rows{};
  std::map<PayloadKey, std::shared_ptr<void>> latest{};
  std::shared_ptr<void> request{};
  std::int64_t num_left = 0;  // rows in front of each key that were given before
  std::optional<EdgeEnd> end{};
};

// The one way from a stage to the next: of each request its rows in order, and then exactly one end.
//
// Ids are REQUEST/GENERATION; one without a generation is of generation 0. What comes for a generation that has not
// begun is parked, what comes for a dead one is dropped. Rows are never judged by their content. Times are seconds of
// the clock that advance() is told.
class StageEdge {
 public:
  // Throws InvalidArgument naming the field.
  StageEdge(EdgeMode mode, EdgeOptions options);

  const EdgeMode& mode() const { return mode_; }
  bool carries(const PayloadKey& key) const;
  bool replaces(const PayloadKey& key) const { return replaced_.contains(key); }
  void advance(double now) { now_ = now; }

  // Begins a request; what was parked for it is there, an older generation of it is cancelled. The first chunk has
  // num_prompt_rows more rows.
  void open(const std::string& id, std::int64_t num_prompt_rows = 0);
  bool is_open(const std::string& id) const;
  // Cancels a request; what still comes for its generation is dropped.
  void close(const std::string& id);
  // Drops all that is known of a request, of any generation; its id may then be used anew.
  void forget(const std::string& id);
  // Requests of which anything is kept: open, parked, or with an end that was not taken.
  std::size_t num_kept() const { return live_.size() + parked_.size() + cancelled_.size(); }

  // Adds rows [n, ...] behind row `begin` of a key; -1: behind the last. Rows that were given already stay as they
  // are, those behind `begin` that were not are written again. Rows of another shape or dtype start the key again.
  // False, changing nothing, for a dead generation, after the end, or where more rows than the capacity would wait.
  bool put(const std::string& id, const PayloadKey& key, TensorView rows, std::int64_t begin = -1);
  // As put, for a stage that cannot wait: where there is no room, the request ends in an error.
  void put_or_fail(const std::string& id, const PayloadKey& key, TensorView rows, std::int64_t begin);
  // Keeps a value that is no rows; likewise.
  bool set(const std::string& id, const PayloadKey& key, std::shared_ptr<void> value);
  bool set_request(const std::string& id, std::shared_ptr<void> request);
  // Only the first end counts. A cancelled request loses what waits.
  bool end(const std::string& id, EndStatus status, std::string error = {});

  // What is due now of all open requests; of a request its end is the last. A wait beyond the deadline ends in an
  // error.
  std::vector<Delivery> take();

 private:
  struct Key {
    EdgeRows rows;
    std::int64_t num_given = 0;
  };
  struct Line {  // of one generation of a request
    std::string id;
    std::map<PayloadKey, Key> keys;
    std::map<PayloadKey, std::shared_ptr<void>> latest;
    std::shared_ptr<void> request;
    std::int64_t num_prompt_rows = 0;
    double last_progress = 0;
    std::optional<EdgeEnd> end;
    bool has_given_end = false;
    bool has_given_latest = false;
  };
  using Name = std::pair<std::string, std::int64_t>;  // request and generation

  static Name split(const std::string& id);
  Line* find(const std::string& id);  // to write to: live, or parked; null for a dead generation
  std::int64_t num_due(const Line& line, const Key& key) const;
  void take(Line& line, std::vector<Delivery>& due);

  EdgeMode mode_;
  EdgeOptions options_;
  std::set<PayloadKey> replaced_;
  double now_ = 0;
  std::map<std::string, std::pair<std::int64_t, Line>> live_;  // by request
  std::map<Name, Line> parked_;
  std::map<std::string, std::int64_t> newest_dead_;
  std::map<Name, std::string> cancelled_;  // whose end was not taken, with their ids
};

}  // namespace deltaic
