// The three ops after one another.
#include "cpp/src/ops/gdn_mixer.h"
#include "cpp/src/ops/rms_norm.h"

namespace deltaic::cpu {

std::size_t gdn_mixer_workspace_bytes(const ops::GdnShape& shape, std::int64_t num_tokens) {
  return static_cast<std::size_t>(num_tokens * shape.conv_dim()) * sizeof(float);
}

void gdn_mixer(ThreadPool& threads, const ops::GdnMixerArgs& args) {
  const ops::GdnShape& shape = args.shape;
  const std::int64_t num_tokens = args.proj.shape[0];
  const TensorView qkv = make_view(args.workspace.data, DType::f32, {num_tokens, shape.conv_dim()});
  causal_conv(threads, shape, args.layout, args.proj, args.conv_weight, args.sequences, args.conv_state, qkv);
  gated_delta_rule(threads, shape, args.layout, qkv, args.proj, args.A_log, args.dt_bias, args.sequences, args.temporal,
                   args.replay, args.out);

  // Heads whose gates lie at one stride go in one call: all of them, or those of a group.
  const std::int64_t dim = shape.value_head_dim, group_size = shape.heads_per_group() * dim;
  const bool is_plain = args.layout.z_group_stride == group_size;
  const int num_calls = is_plain ? 1 : shape.num_key_heads;
  const std::int64_t num_heads = shape.num_value_heads / num_calls;
  for (int i = 0; i < num_calls; ++i) {
    TensorView heads = args.out, z = args.out;
    heads.shape[1] = z.shape[1] = num_heads;
    heads.data = args.out.as<float>() + i * num_heads * dim;
    z.data = args.proj.as<float>() + args.layout.z + i * args.layout.z_group_stride;
    z.stride[0] = args.proj.stride[0];
    gated_rms_norm(threads, heads, z, args.norm_weight, args.eps, heads);
  }
}

}  // namespace deltaic::cpu
