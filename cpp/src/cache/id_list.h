#pragma once

#include <cassert>
#include <vector>

namespace deltaic::cache {

// Some of the ids 0 ... capacity - 1 in an order. Everything is O(1), removal from the middle too.
class IdList {
 public:
  explicit IdList(int capacity) : end_(capacity), links_(static_cast<std::size_t>(capacity) + 1, Link{kOut, kOut}) {
    at(end_) = {end_, end_};
  }

  int size() const { return size_; }
  bool empty() const { return size_ == 0; }
  bool contains(int id) const { return at(id).next != kOut; }
  int front() const { return at(end_).next; }  // of a list that is not empty
  // The id after `id`, or -1.
  int next(int id) const { return at(id).next == end_ ? -1 : at(id).next; }

  void push_front(int id) { insert(id, at(end_).next); }
  void push_back(int id) { insert(id, end_); }
  void remove(int id) {
    assert(contains(id));
    const Link link = at(id);
    at(link.prev).next = link.next;
    at(link.next).prev = link.prev;
    at(id) = {kOut, kOut};
    --size_;
  }

 private:
  static constexpr int kOut = -1;
  struct Link {
    int prev, next;
  };
  Link& at(int id) { return links_[static_cast<std::size_t>(id)]; }
  const Link& at(int id) const { return links_[static_cast<std::size_t>(id)]; }
  void insert(int id, int before) {
    assert(!contains(id));
    const int prev = at(before).prev;
    at(id) = {prev, before};
    at(prev).next = id;
    at(before).prev = id;
    ++size_;
  }

  int end_;  // the sentinel's id
  std::vector<Link> links_;
  int size_ = 0;
};

}  // namespace deltaic::cache
