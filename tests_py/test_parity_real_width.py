"""On a GPU, at the widths of published models: random weights, against transformers on the same card."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from deltaic import _core
from step_driver import StepDriver, make_runner
from test_parity import MIN_MARGIN, assert_close
from test_parity_bf16 import assert_as_close_as_transformers

CONFIGS = Path(__file__).parent.parent / "bench" / "configs"
# (the sizes, the classes of transformers, how many of the layers)
MODELS = {
    "qwen3_5_0_8b": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", 24),
    "qwen3_5_35b_a3b": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", 4),
}
PROMPT_LENGTH, NUM_DECODED = 170, 24

if _core.num_cuda_devices() == 0:
    pytest.skip("no CUDA device in this build or machine", allow_module_level=True)
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
torch.backends.cudnn.allow_tf32 = False  # of convolutions; products are float32 by default


def initialise(model: Any) -> None:
    """Peaked logits, norms far from trivial, uneven routing, and heads that remember for long or hardly at all."""
    generator = torch.Generator("cuda").manual_seed(7)

    def normal(parameter: Any, std: float, mean: float = 0.0) -> None:
        parameter.normal_(mean, std, generator=generator)

    hidden, is_tied = model.config.hidden_size, model.config.tie_word_embeddings
    for name, parameter in model.named_parameters():
        if name.endswith("embed_tokens.weight"):
            normal(parameter, 4.0 / hidden**0.5 if is_tied else 1.0)
        elif name.endswith("lm_head.weight"):
            normal(parameter, 4.0 / hidden**0.5)
        elif name.endswith("A_log"):
            parameter.uniform_(0.02, 1.5, generator=generator).log_()
            parameter[-1] = np.log(15.5)
        elif name.endswith("dt_bias"):
            parameter.uniform_(-4.5, -0.5, generator=generator)
        elif name.endswith("conv1d.weight"):
            normal(parameter, 0.6)
        elif name.endswith("linear_attn.norm.weight"):
            normal(parameter, 0.25, 1.0)
        elif name.endswith(("q_norm.weight", "k_norm.weight")):
            normal(parameter, 0.2, 0.5)
        elif name.endswith("norm.weight"):
            normal(parameter, 0.25)
        elif name.endswith("mlp.gate.weight"):
            normal(parameter, 2.5 / hidden**0.5)
        else:
            normal(parameter, 1.1 / parameter.shape[-1] ** 0.5)
    model.tie_weights()


def logits_of(model: Any, tokens: list[int]) -> np.ndarray:
    with torch.no_grad():
        logits: np.ndarray = (
            model(torch.tensor([tokens], device="cuda"), use_cache=False).logits[0].float().cpu().numpy()
        )
    return logits


@pytest.fixture(scope="module", params=MODELS)
def model(request: Any, tmp_path_factory: Any) -> Any:
    """A checkpoint in bf16, tokens, and the logits of transformers: in f32 on these weights, and in bf16."""
    config_name, class_name, num_layers = MODELS[request.param]
    sizes = json.loads((CONFIGS / f"{request.param}.json").read_text())["text_config"]
    sizes.update(num_hidden_layers=num_layers, layer_types=sizes["layer_types"][:num_layers])
    config = getattr(transformers, config_name)(**sizes)
    new_model = getattr(transformers, class_name)
    checkpoint = tmp_path_factory.mktemp("checkpoint")
    with torch.device("cuda"), torch.no_grad():
        hf_model = new_model(config).to(torch.bfloat16)
        initialise(hf_model)
    hf_model.save_pretrained(checkpoint)
    rng = np.random.default_rng(3)
    tokens = rng.integers(0, sizes["vocab_size"], PROMPT_LENGTH).tolist()

    def load(dtype: Any) -> Any:
        kinds = {"attn_implementation": "eager", "experts_implementation": "eager"}
        return new_model.from_pretrained(checkpoint, dtype=dtype, **kinds).to("cuda").eval()

    bf16 = logits_of(load(torch.bfloat16), tokens)
    hf_model = load(torch.float32)
    f32 = logits_of(hf_model, tokens)
    greedy: list[int] = []
    margins: list[float] = []
    for _ in range(NUM_DECODED):
        last = logits_of(hf_model, tokens + greedy)[-1]
        second, best = np.sort(last)[-2:]
        greedy.append(int(last.argmax()))
        margins.append(float(best - second))
    del hf_model
    torch.cuda.empty_cache()
    golden = {"all_logits": f32, "hf_bf16_all_logits": bf16}
    if "num_experts" in sizes:
        golden["router_margin_0"] = np.zeros(0)
    return {"checkpoint": checkpoint, "tokens": tokens, "golden": golden, "greedy": greedy, "margins": margins}


def runner_of(model: Any, dtype: Any) -> Any:
    return make_runner(model["checkpoint"], 2, _core.Device(_core.DeviceType.cuda), dtype)


def test_float32_gives_the_logits_and_tokens_of_transformers(model: Any) -> None:
    runner = runner_of(model, _core.DType.f32)
    logits, _ = runner.dense_forward(model["tokens"])
    assert_close(logits, model["golden"]["all_logits"], "f32")
    driver = StepDriver(runner)
    row = driver.add("0", model["tokens"])
    driver.prefill("0", 64)
    driver.decode(NUM_DECODED - 1)
    for token, expected, margin in zip(row.output, model["greedy"], model["margins"], strict=True):
        if token != expected:
            assert margin < MIN_MARGIN
            break  # from here on another text is right
    assert row.output[0] == model["greedy"][0]


def test_bfloat16_is_as_close_as_transformers(model: Any) -> None:
    logits, _ = runner_of(model, _core.DType.bf16).dense_forward(model["tokens"])
    assert_as_close_as_transformers(logits, model["golden"], "all_logits")
