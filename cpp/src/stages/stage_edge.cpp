#include "cpp/src/stages/stage_edge.h"

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <cstring>

#include "cpp/src/check.h"

namespace deltaic {

namespace {

std::string seconds(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f s", value);
  return text;
}

}  // namespace

std::size_t EdgeRows::row_bytes() const {
  std::size_t count_in_row = 1;
  for (const std::int64_t size : row_shape) count_in_row *= static_cast<std::size_t>(size);
  return count_in_row * size_of(dtype);
}

StageEdge::StageEdge(EdgeMode mode, EdgeOptions options)
    : mode_(mode), options_(std::move(options)), replaced_(options_.replace_keys.begin(), options_.replace_keys.end()) {
  DELTAIC_CHECK(mode.first >= 1 && mode.size >= 1 && mode.left_context >= 0, "an edge in chunks of first ", mode.first,
                ", size ", mode.size, ", left_context ", mode.left_context);
  DELTAIC_CHECK(!options_.keys.empty(), "edge ", options_.name, " carries no key");
  DELTAIC_CHECK(options_.capacity >= 1, "capacity must be at least 1, got ", options_.capacity);
  DELTAIC_CHECK(!options_.deadline_s || *options_.deadline_s > 0, "deadline_s must be above 0, got ",
                *options_.deadline_s);
}

bool StageEdge::carries(const PayloadKey& key) const {
  return std::find(options_.keys.begin(), options_.keys.end(), key) != options_.keys.end();
}

StageEdge::Name StageEdge::split(const std::string& id) {
  const std::size_t slash = id.rfind('/');
  if (slash == std::string::npos || slash + 1 == id.size()) return {id, 0};
  std::int64_t generation = 0;
  const auto [end, error] = std::from_chars(id.data() + slash + 1, id.data() + id.size(), generation);
  if (error != std::errc{} || end != id.data() + id.size() || generation < 0) return {id, 0};
  return {id.substr(0, slash), generation};
}

void StageEdge::open(const std::string& id, std::int64_t num_prompt_rows) {
  const Name name = split(id);
  const auto live = live_.find(name.first);
  DELTAIC_CHECK(live == live_.end() || live->second.first < name.second, "request ", id, " is open, or a later one is");
  if (live != live_.end()) close(live->second.second.id);
  std::int64_t& newest_dead = newest_dead_.try_emplace(name.first, -1).first->second;
  DELTAIC_CHECK(name.second > newest_dead, "request ", id, " has ended");
  newest_dead = std::max(newest_dead, name.second - 1);
  Line line;
  if (auto parked = parked_.extract(name); !parked.empty()) line = std::move(parked.mapped());
  line.id = id, line.num_prompt_rows = num_prompt_rows, line.last_progress = now_;
  live_.insert_or_assign(name.first, std::pair(name.second, std::move(line)));
  std::erase_if(parked_,
                [&](const auto& entry) { return entry.first.first == name.first && entry.first.second < name.second; });
}

bool StageEdge::is_open(const std::string& id) const {
  const Name name = split(id);
  const auto live = live_.find(name.first);
  return live != live_.end() && live->second.first == name.second;
}

void StageEdge::close(const std::string& id) {
  if (!is_open(id)) return;
  const Name name = split(id);
  newest_dead_[name.first] = std::max(newest_dead_[name.first], name.second);
  if (!live_.at(name.first).second.has_given_end) cancelled_[name] = id;
  live_.erase(name.first);
}

void StageEdge::forget(const std::string& id) {
  const std::string request = split(id).first;
  live_.erase(request);
  newest_dead_.erase(request);
  std::erase_if(parked_, [&](const auto& entry) { return entry.first.first == request; });
  std::erase_if(cancelled_, [&](const auto& entry) { return entry.first.first == request; });
}

StageEdge::Line* StageEdge::find(const std::string& id) {
  const Name name = split(id);
  const auto live = live_.find(name.first);
  if (live != live_.end() && live->second.first == name.second) return &live->second.second;
  const auto dead = newest_dead_.find(name.first);
  if (dead != newest_dead_.end() && name.second <= dead->second) return nullptr;
  Line& line = parked_[name];
  line.id = id;
  return &line;
}

bool StageEdge::put(const std::string& id, const PayloadKey& key, TensorView rows, std::int64_t begin) {
  DELTAIC_CHECK(rows.rank >= 2 && rows.is_contiguous(), "rows of ", key.first, ".", key.second, " have rank ",
                rows.rank, ", wanted contiguous ones of rank 2 or more");
  DELTAIC_CHECK(!replaced_.contains(key), key.first, ".", key.second, " is replaced as a whole");
  Line* line = find(id);
  if (line == nullptr || line->end) return false;
  const std::vector<std::int64_t> shape(rows.shape.begin() + 1, rows.shape.begin() + rows.rank);
  Key& held = line->keys[key];
  std::int64_t num_given = held.num_given, num_held = held.rows.count;
  const bool fits = held.rows.dtype == rows.dtype && held.rows.row_shape == shape;
  if (!fits) num_given = num_held = 0;
  if (begin < 0) begin = num_held;
  DELTAIC_CHECK(begin <= num_held, "request ", id, " goes on at row ", begin, " of ", key.first, ".", key.second, ", ",
                num_held, " are there");
  const std::int64_t first = std::max(begin, num_given);  // rows before it were given
  const std::int64_t end = std::max(begin + rows.shape[0], num_given);
  if (end - num_given > options_.capacity) return false;
  if (!fits) held = {.rows = {.dtype = rows.dtype, .row_shape = shape}};
  const std::size_t width = held.rows.row_bytes();
  held.rows.bytes.resize(static_cast<std::size_t>(end) * width);
  if (first < end)
    std::memcpy(held.rows.bytes.data() + static_cast<std::size_t>(first) * width,
                static_cast<const std::byte*>(rows.data) + static_cast<std::size_t>(first - begin) * width,
                static_cast<std::size_t>(end - first) * width);
  held.rows.count = end;
  line->latest.erase(key);
  line->last_progress = now_;
  return true;
}

void StageEdge::put_or_fail(const std::string& id, const PayloadKey& key, TensorView rows, std::int64_t begin) {
  if (!put(id, key, rows, begin))
    end(id, EndStatus::error, detail::concat("more than ", options_.capacity, " rows wait on ", options_.name));
}

bool StageEdge::set(const std::string& id, const PayloadKey& key, std::shared_ptr<void> value) {
  Line* line = find(id);
  if (line == nullptr || line->end) return false;
  line->keys.erase(key);
  line->latest[key] = std::move(value);
  line->has_given_latest = false;
  line->last_progress = now_;
  return true;
}

bool StageEdge::set_request(const std::string& id, std::shared_ptr<void> request) {
  Line* line = find(id);
  if (line == nullptr || line->end) return false;
  line->request = std::move(request);
  return true;
}

bool StageEdge::end(const std::string& id, EndStatus status, std::string error) {
  Line* line = find(id);
  if (line == nullptr || line->end) return false;
  line->end = EdgeEnd{status, std::move(error)};
  if (status == EndStatus::cancelled) line->keys.clear(), line->latest.clear();
  return true;
}

std::int64_t StageEdge::num_due(const Line& line, const Key& key) const {
  const std::int64_t waiting = key.rows.count - key.num_given;
  if (line.end) return waiting;
  if (mode_.is_full) return 0;
  if (key.num_given > 0) return waiting / mode_.size * mode_.size;
  const std::int64_t first = line.num_prompt_rows + mode_.first;
  return waiting >= first ? first + (waiting - first) / mode_.size * mode_.size : 0;
}

void StageEdge::take(Line& line, std::vector<Delivery>& due) {
  if (!line.end && options_.deadline_s && now_ - line.last_progress >= *options_.deadline_s) {
    const std::string of = options_.name.empty() ? "" : detail::concat(" over ", options_.name);
    line.end = EdgeEnd{EndStatus::error, detail::concat("nothing came", of, " for ", seconds(now_ - line.last_progress),
                                                        ", the deadline is ", seconds(*options_.deadline_s))};
  }
  Delivery delivery{.id = line.id};
  for (auto& [key, held] : line.keys) {
    const std::int64_t count = num_due(line, held);
    if (count == 0) continue;
    const std::int64_t left = std::min<std::int64_t>(held.num_given, mode_.left_context);
    const std::size_t width = held.rows.row_bytes();
    const auto begin = held.rows.bytes.begin() + static_cast<std::ptrdiff_t>(width) * (held.num_given - left);
    delivery.rows[key] = {.dtype = held.rows.dtype,
                          .row_shape = held.rows.row_shape,
                          .bytes = {begin, begin + static_cast<std::ptrdiff_t>(width) * (left + count)},
                          .count = left + count};
    delivery.num_left = left;
    held.num_given += count;
  }
  const bool is_due = !delivery.rows.empty() || (!line.has_given_latest && !line.latest.empty() && line.end);
  if (is_due) {
    delivery.latest = line.latest, delivery.request = line.request;
    line.has_given_latest = true;
    line.last_progress = now_;
    due.push_back(std::move(delivery));
  }
  if (line.end && !line.has_given_end) {
    line.has_given_end = true;
    due.push_back({.id = line.id, .request = line.request, .end = line.end});
  }
}

std::vector<Delivery> StageEdge::take() {
  std::vector<Delivery> due;
  for (const auto& [name, id] : cancelled_) due.push_back({.id = id, .end = EdgeEnd{EndStatus::cancelled}});
  cancelled_.clear();
  for (auto& [request, live] : live_) take(live.second, due);
  return due;
}

}  // namespace deltaic
