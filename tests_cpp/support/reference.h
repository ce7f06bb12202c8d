#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

// Slow and obvious versions of the ops, in double, on plain row-major vectors.
namespace deltaic::reference {

using Values = std::vector<double>;

inline double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }
inline double silu(double x) { return x * sigmoid(x); }
inline double softplus(double x) { return x > 20.0 ? x : std::log1p(std::exp(x)); }

// [rows, size]
inline Values rms_norm(const Values& x, const Values& weight, double eps) {
  Values y(x.size());
  const std::size_t size = weight.size();
  for (std::size_t row = 0; row < x.size(); row += size) {
    double squares = 0.0;
    for (std::size_t i = 0; i < size; ++i) squares += x[row + i] * x[row + i];
    const double rms = std::sqrt(squares / static_cast<double>(size) + eps);
    for (std::size_t i = 0; i < size; ++i) y[row + i] = x[row + i] / rms * weight[i];
  }
  return y;
}

// x [m, k], w [n, k] -> [m, n]
inline Values linear(const Values& x, const Values& w, std::size_t m, std::size_t n, std::size_t k) {
  Values y(m * n, 0.0);
  for (std::size_t i = 0; i < m; ++i)
    for (std::size_t j = 0; j < n; ++j)
      for (std::size_t l = 0; l < k; ++l) y[i * n + j] += x[i * k + l] * w[j * k + l];
  return y;
}

// One query [dim] over keys and values [num_keys, dim].
inline Values attention(const double* q, const Values& k, const Values& v, std::size_t dim, double scale) {
  const std::size_t num_keys = k.size() / dim;
  Values scores(num_keys, 0.0), out(dim, 0.0);
  for (std::size_t j = 0; j < num_keys; ++j)
    for (std::size_t c = 0; c < dim; ++c) scores[j] += scale * q[c] * k[j * dim + c];
  const double largest = *std::max_element(scores.begin(), scores.end());
  double sum = 0.0;
  for (double& score : scores) sum += score = std::exp(score - largest);
  for (std::size_t j = 0; j < num_keys; ++j)
    for (std::size_t c = 0; c < dim; ++c) out[c] += scores[j] / sum * v[j * dim + c];
  return out;
}

// One head of the gated delta rule: q, k [T, dk], v [T, dv], beta, g [T]; q and k raw. State [dv, dk] is updated.
struct DeltaHead {
  std::size_t dk = 0, dv = 0;
  Values q, k, v, beta, g;
  std::size_t num_tokens() const { return g.size(); }
};

inline Values normalized(const Values& rows, std::size_t dim, double scale) {
  Values result(rows.size());
  for (std::size_t row = 0; row < rows.size(); row += dim) {
    double squares = 0.0;
    for (std::size_t i = 0; i < dim; ++i) squares += rows[row + i] * rows[row + i];
    for (std::size_t i = 0; i < dim; ++i) result[row + i] = rows[row + i] / std::sqrt(squares + 1e-6) * scale;
  }
  return result;
}

// Token by token (docs/models.md, "Gated delta rule"). Returns [T, dv].
inline Values delta_rule(const DeltaHead& head, Values& state) {
  const std::size_t dk = head.dk, dv = head.dv;
  const Values q = normalized(head.q, dk, 1.0 / std::sqrt(static_cast<double>(dk))), k = normalized(head.k, dk, 1.0);
  Values out(head.num_tokens() * dv, 0.0);
  for (std::size_t t = 0; t < head.num_tokens(); ++t)
    for (std::size_t i = 0; i < dv; ++i) {
      double* row = state.data() + i * dk;
      double dot = 0.0;
      for (std::size_t c = 0; c < dk; ++c) dot += (row[c] *= std::exp(head.g[t])) * k[t * dk + c];
      const double u = head.beta[t] * (head.v[t * dv + i] - dot);
      for (std::size_t c = 0; c < dk; ++c) out[t * dv + i] += (row[c] += u * k[t * dk + c]) * q[t * dk + c];
    }
  return out;
}

// Chunk by chunk (docs/models.md, "Gated delta rule in chunks"): another way to the same numbers.
inline Values chunked_delta_rule(const DeltaHead& head, Values& state, std::size_t chunk_size) {
  const std::size_t dk = head.dk, dv = head.dv;
  const Values q = normalized(head.q, dk, 1.0 / std::sqrt(static_cast<double>(dk))), k = normalized(head.k, dk, 1.0);
  Values out(head.num_tokens() * dv, 0.0);
  for (std::size_t begin = 0; begin < head.num_tokens(); begin += chunk_size) {
    const std::size_t c = std::min(chunk_size, head.num_tokens() - begin);
    const double *Q = q.data() + begin * dk, *K = k.data() + begin * dk, *V = head.v.data() + begin * dv;
    Values G(c);
    for (std::size_t i = 0; i < c; ++i) G[i] = head.g[begin + i] + (i > 0 ? G[i - 1] : 0.0);
    const auto dot = [&](const double* a, const double* b) {
      double sum = 0.0;
      for (std::size_t l = 0; l < dk; ++l) sum += a[l] * b[l];
      return sum;
    };
    // V' = (I + A)^-1 (diag(beta) V - diag(beta e^G) K S0), row by row.
    Values fresh(c * dv);
    for (std::size_t i = 0; i < c; ++i)
      for (std::size_t r = 0; r < dv; ++r) {
        double value = V[i * dv + r] - std::exp(G[i]) * dot(K + i * dk, state.data() + r * dk);
        for (std::size_t j = 0; j < i; ++j)
          value -= dot(K + i * dk, K + j * dk) * std::exp(G[i] - G[j]) * fresh[j * dv + r];
        fresh[i * dv + r] = head.beta[begin + i] * value;
      }
    for (std::size_t i = 0; i < c; ++i)
      for (std::size_t r = 0; r < dv; ++r) {
        double value = std::exp(G[i]) * dot(Q + i * dk, state.data() + r * dk);
        for (std::size_t j = 0; j <= i; ++j)
          value += dot(Q + i * dk, K + j * dk) * std::exp(G[i] - G[j]) * fresh[j * dv + r];
        out[(begin + i) * dv + r] = value;
      }
    for (std::size_t r = 0; r < dv; ++r)
      for (std::size_t l = 0; l < dk; ++l) {
        double value = std::exp(G[c - 1]) * state[r * dk + l];
        for (std::size_t i = 0; i < c; ++i) value += std::exp(G[c - 1] - G[i]) * K[i * dk + l] * fresh[i * dv + r];
        state[r * dk + l] = value;
      }
  }
  return out;
}

}  // namespace deltaic::reference
