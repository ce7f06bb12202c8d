#pragma once

#include <cstdint>
#include <numeric>
#include <string>
#include <string_view>
#include <vector>

#include <deltaic/cache.h>
#include <doctest/doctest.h>

namespace deltaic::test {

// first, first + 1, ...
inline std::vector<std::int32_t> tokens(int count, int first = 0) {
  std::vector<std::int32_t> ids(static_cast<std::size_t>(count));
  std::iota(ids.begin(), ids.end(), first);
  return ids;
}

// A request from admission to its end in one step, without snapshots. Returns the hit.
inline PrefixHit run(CacheManager& cache, const std::string& req_id, const std::vector<std::int32_t>& token_ids,
                     std::string_view salt = {}) {
  cache.add_request(req_id, token_ids, salt);
  const PrefixHit hit = cache.find_prefix(req_id);
  const int num_tokens = static_cast<int>(token_ids.size());
  REQUIRE(cache.admit(req_id, hit, num_tokens));
  cache.publish(req_id, num_tokens);
  cache.remove_request(req_id);
  return hit;
}

}  // namespace deltaic::test
