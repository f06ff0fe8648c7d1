"""Writes the small GGUF and JSON seeds of `corpus/`: `python make_corpus.py` in this folder. Needs nothing but Python."""

import json
import os
import struct


def text(value):
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def array(kind, items):
    return struct.pack("<IQ", kind, len(items)) + b"".join(items)


def u32(value):
    return 4, struct.pack("<I", value)


def f32(value):
    return 6, struct.pack("<f", value)


def gguf(name, keys, tensors, version=3):
    out = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(keys))
    for key, (kind, raw) in keys.items():
        out += text(key) + struct.pack("<I", kind) + raw
    data = b""
    for tensor, dimensions, kind, size in tensors:
        out += text(tensor) + struct.pack("<I", len(dimensions)) + struct.pack(f"<{len(dimensions)}Q", *dimensions)
        out += struct.pack("<IQ", kind, len(data))
        data += bytes(i % 251 for i in range(size)) + b"\0" * (-size % 32)
    out += b"\0" * (-len(out) % 32)
    with open(f"corpus/gguf/{name}.gguf", "wb") as file:
        file.write(out + data)


def llama(tokens, kind):
    keys = {
        "general.architecture": (8, text("llama")),
        "llama.block_count": u32(1),
        "llama.context_length": u32(64),
        "llama.embedding_length": u32(32),
        "llama.feed_forward_length": u32(32),
        "llama.attention.head_count": u32(2),
        "llama.attention.head_count_kv": u32(1),
        "llama.attention.layer_norm_rms_epsilon": f32(1e-5),
        "llama.rope.freq_base": f32(10000),
        "tokenizer.ggml.model": (8, text(kind)),
        "tokenizer.ggml.tokens": (9, array(8, [text(token) for token in tokens])),
        "tokenizer.ggml.scores": (9, array(6, [struct.pack("<f", -i) for i in range(len(tokens))])),
        "tokenizer.ggml.token_type": (9, array(5, [struct.pack("<i", 3 if token[:1] == "<" else 1) for token in tokens])),
        "tokenizer.ggml.bos_token_id": u32(1),
        "tokenizer.ggml.eos_token_id": u32(2),
        "tokenizer.chat_template": (8, text("{% for message in messages %}{{ message.content }}{% endfor %}")),
    }
    if kind == "gpt2":
        keys["tokenizer.ggml.pre"] = (8, text("llama-bpe"))
        keys["tokenizer.ggml.merges"] = (9, array(8, [text("a b"), text("ab c")]))
    layer = [("attn_q", 32, 32), ("attn_k", 32, 16), ("attn_v", 32, 16), ("attn_output", 32, 32)]
    layer += [("ffn_gate", 32, 32), ("ffn_up", 32, 32), ("ffn_down", 32, 32)]
    tensors = [("token_embd.weight", (32, len(tokens)), 8, 34 * len(tokens)), ("output_norm.weight", (32,), 0, 128)]
    tensors += [(f"blk.0.{part}.weight", (columns, rows), 2, 18 * rows) for part, columns, rows in layer]
    tensors += [(f"blk.0.{part}_norm.weight", (32,), 0, 128) for part in ("attn", "ffn")]
    return keys, tensors


for folder in ("gguf", "safetensors", "tokenizer", "config"):
    os.makedirs(f"corpus/{folder}", exist_ok=True)
gguf("llama-spm", *llama(["<unk>", "<s>", "</s>", "<0x41>", "▁a", "b", "c"], "llama"))
gguf("llama-bpe", *llama(["a", "<s>", "</s>", "b", "c", "ab", "abc", "Ġ"], "gpt2"), version=2)
gguf("types", {f"k{kind}": (kind, raw) for kind, raw in enumerate([b"\1", b"\1", b"\1\0", b"\1\0", b"\1\0\0\0", b"\1\0\0\0"])}, [])
gguf("wide", {"general.alignment": u32(32)}, [("t", (256, 1, 1, 2), 14, 420), ("u", (64, 2), 40, 72)])
with open("corpus/safetensors/plain.safetensors", "wb") as file:
    header = {"__metadata__": {"format": "pt"}}
    header["model.embed_tokens.weight"] = {"dtype": "BF16", "shape": [4, 4], "data_offsets": [0, 32]}
    header["a"] = {"dtype": "F32", "shape": [], "data_offsets": [32, 36]}
    raw = json.dumps(header).encode()
    file.write(struct.pack("<Q", len(raw)) + raw + bytes(36))
with open("corpus/config/groups.json", "w") as file:
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "block_structure": "128x128"}
    groups = {"group_0": {"format": None, "targets": ["Linear"], "weights": weights}}
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups, "sparsity_config": {"format": "dense"}}
    json.dump({"model_type": "llama", "quantization_config": config}, file)
with open("corpus/tokenizer/bpe.json", "w") as file:
    added = [{"id": 4, "content": "<s>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}]
    model = {"type": "BPE", "dropout": None, "unk_token": None, "byte_fallback": False, "vocab": {"a": 0, "b": 1, "ab": 2, "\u0120": 3}, "merges": ["a b"]}
    split = {"type": "Split", "pattern": {"Regex": "\\s+|\\w+"}, "behavior": "Isolated", "invert": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    whole = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": {"type": "NFC"}}
    whole |= {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, level]}, "post_processor": None, "decoder": level, "model": model}
    json.dump(whole, file)
