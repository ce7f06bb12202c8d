#include <doctest/doctest.h>

#include <deltaic/error.h>

#include "cpp/src/runner/state_slots.h"

using namespace deltaic;

TEST_CASE("slots are handed out 0, 1, 2, ... and count from 0") {
  StateSlots slots(3);
  CHECK(slots.assign("a") == 0);
  CHECK(slots.assign("b") == 1);
  CHECK(slots.assign("c") == 2);
}

TEST_CASE("an ended request keeps its slot until the reclaim, then the lowest free slot is handed out") {
  StateSlots slots(3);
  slots.assign("a"), slots.assign("b"), slots.assign("c");
  slots.end("c");
  slots.end("a");
  slots.end("a");
  slots.end("unknown");
  CHECK(slots.num_live() == 1);
  CHECK(slots.slots().at("a") == 0);
  slots.reclaim();
  CHECK_FALSE(slots.owns("a"));
  CHECK(slots.assign("d") == 0);
  CHECK(slots.assign("e") == 2);
  CHECK(slots.slots().at("b") == 1);
}

TEST_CASE("more live sequences than slots is a clear error that names both numbers") {
  StateSlots slots(2);
  slots.assign("a"), slots.assign("b");
  CHECK_THROWS_WITH_AS(slots.assign("c"), "request c needs a state slot: 3 live sequences, state slots for 2",
                       InvalidArgument);
}
