"""Writes tiny quantised checkpoints and what they hold, from the published descriptions of the formats.

Needs numpy only: `python make.py` in this folder. One folder per format, with `config.json`, `model.safetensors` and
`golden.safetensors` (the same names, F32). Nothing here is shared with the code that it tests.
"""

import json
import os
import struct

import numpy as np

rng = np.random.default_rng(4)
NAMES = {"float32": "F32", "float16": "F16", "int32": "I32", "int64": "I64", "int8": "I8", "uint8": "U8"}


class Typed:
    """Bytes of a type that numpy lacks."""

    def __init__(self, dtype, array):
        self.dtype, self.array = dtype, array


def save(path, tensors):
    header, data = {}, b""
    for name, tensor in tensors.items():
        dtype, array = (tensor.dtype, tensor.array) if isinstance(tensor, Typed) else (NAMES[tensor.dtype.name], tensor)
        raw = np.ascontiguousarray(array).tobytes()
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + data)


def folder(name, quantization, tensors, golden):
    os.makedirs(name, exist_ok=True)
    with open(f"{name}/config.json", "w") as file:
        json.dump({"model_type": "llama", "quantization_config": quantization}, file, indent=1)
        file.write("\n")
    save(f"{name}/model.safetensors", tensors)
    save(f"{name}/golden.safetensors", {key: value.astype(np.float32) for key, value in golden.items()})


def bf16(values):
    """Nearest bfloat16: its bits, and its value."""
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    bits = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return Typed("BF16", bits), (bits.astype(np.uint32) << 16).view(np.float32)


def e4m3(byte):
    sign, exponent, mantissa = byte >> 7, (byte >> 3) & 15, byte & 7
    value = mantissa * 2.0**-9 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return np.float32(-value if sign else value)


E4M3 = np.array([e4m3(byte) for byte in range(256)], dtype=np.float32)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=np.float32)


def random_e4m3(shape):
    bytes_ = rng.integers(0, 256, shape, dtype=np.uint8)
    bytes_[(bytes_ & 0x7F) == 0x7F] = 0x38  # not a number
    return bytes_


def pack_stream_down(values, bits):
    """GPTQ's qweight: a stream of bits down each column, words from the low bit up."""
    rows, columns = values.shape
    out = np.zeros((rows * bits // 32, columns), dtype=np.uint32)
    for row in range(rows):
        for bit in range(bits):
            at = row * bits + bit
            out[at // 32] |= ((values[row].astype(np.uint32) >> bit) & 1) << (at % 32)
    return out.view(np.int32)


def pack_stream_across(values, bits):
    return np.ascontiguousarray(pack_stream_down(values.T, bits).T)


def gptq(out, columns, bits, group, order, sym, less_one):
    groups = columns // group
    q = rng.integers(0, 2**bits, (columns, out))
    zeros = np.full((groups, out), 2 ** (bits - 1)) if sym else rng.integers(1, 2**bits, (groups, out))
    scales = rng.uniform(0.001, 0.02, (groups, out)).astype(np.float16)
    index = np.arange(columns) // group
    if order:
        index = rng.permutation(index)
    weight = scales[index].astype(np.float32) * (q - zeros[index]).astype(np.float32)
    tensors = {
        "qweight": pack_stream_down(q, bits),
        "qzeros": pack_stream_across(zeros - 1 if less_one else zeros, bits),
        "scales": scales,
        "g_idx": index.astype(np.int32),
    }
    return tensors, weight.T


def collect(tensors, golden, prefix, made):
    parts, weight = made
    tensors.update({f"{prefix}.{name}": part for name, part in parts.items()})
    golden[f"{prefix}.weight"] = weight


def make_gptq():
    tensors, golden = {"norm.weight": np.ones(8, dtype=np.float16)}, {"norm.weight": np.ones(8)}
    collect(tensors, golden, "sym", gptq(24, 64, 4, 32, False, True, True))
    collect(tensors, golden, "asym", gptq(32, 64, 4, 32, False, False, True))
    collect(tensors, golden, "order", gptq(16, 128, 4, 32, True, True, True))
    collect(tensors, golden, "eight", gptq(16, 64, 8, 64, False, True, True))
    collect(tensors, golden, "three", gptq(32, 96, 3, 32, False, False, True))
    # Every module has a bias, which is of zeros where the model has none.
    tensors["sym.bias"] = np.zeros(24, dtype=np.float16)
    tensors["asym.bias"] = np.arange(32, dtype=np.float16)
    golden["asym.bias"] = np.arange(32)
    config = {"bits": 4, "group_size": 32, "desc_act": True, "sym": False, "quant_method": "gptq"}
    folder("gptq", config, tensors, golden)
    tensors, golden = {}, {}
    collect(tensors, golden, "asym", gptq(16, 64, 4, 16, False, False, False))
    folder("gptq-v2", {**config, "checkpoint_format": "gptq_v2"}, tensors, golden)


def pack_awq(values):
    """Eight outputs a word; the word's nibbles from the low one up are outputs 0 2 4 6 1 3 5 7."""
    out = np.zeros((values.shape[0], values.shape[1] // 8), dtype=np.uint32)
    for nibble, output in enumerate([0, 2, 4, 6, 1, 3, 5, 7]):
        out |= values[:, output::8].astype(np.uint32) << (4 * nibble)
    return out.view(np.int32)


def make_awq():
    out, columns, group = 32, 128, 64
    tensors, golden = {}, {}
    for name, sym in [("asym", False), ("sym", True)]:
        q = rng.integers(0, 16, (columns, out))
        zeros = np.full((columns // group, out), 8) if sym else rng.integers(0, 16, (columns // group, out))
        scales = rng.uniform(0.001, 0.02, zeros.shape).astype(np.float16)
        index = np.arange(columns) // group
        weight = scales[index].astype(np.float32) * (q - zeros[index]).astype(np.float32)
        parts = {"qweight": pack_awq(q), "qzeros": pack_awq(zeros), "scales": scales}
        collect(tensors, golden, name, (parts, weight.T))
    config = {"bits": 4, "group_size": group, "zero_point": True, "version": "gemm", "quant_method": "awq"}
    folder("awq", config, tensors, golden)


def pack_rows(signed, bits):
    """compressed-tensors: values + half the range, from the low bits up, rows padded to words."""
    each = 32 // bits
    unsigned = (signed + 2 ** (bits - 1)).astype(np.uint32)
    unsigned = np.pad(unsigned, ((0, 0), (0, -unsigned.shape[1] % each)))
    words = unsigned.reshape(len(unsigned), -1, each) << (np.arange(each, dtype=np.uint32) * bits)
    return np.bitwise_or.reduce(words, axis=2).astype(np.uint32).view(np.int32)


def compressed(out, columns, bits, groups, sym=True, order=False, half=False):
    half_range = 2 ** (bits - 1)
    q = rng.integers(-half_range, half_range, (out, columns))
    zeros = np.zeros((out, groups), dtype=np.int64) if sym else rng.integers(-half_range, half_range, (out, groups))
    raw = rng.uniform(0.001, 0.02, (out, groups))
    stored, scales = (raw.astype(np.float16),) * 2 if half else bf16(raw)
    index = np.arange(columns) // (columns // groups)
    if order:
        index = rng.permutation(index)
    weight = scales[:, index].astype(np.float32) * (q - zeros[:, index]).astype(np.float32)
    parts = {
        "weight_packed": pack_rows(q, bits),
        "weight_scale": stored,
        "weight_shape": np.array([out, columns], dtype=np.int64),
    }
    if not sym:
        parts["weight_zero_point"] = np.ascontiguousarray(pack_rows(zeros.T, bits).T)
    if order:
        parts["weight_g_idx"] = index.astype(np.int32)
    return parts, weight


def make_compressed():
    tensors, golden = {}, {}
    collect(tensors, golden, "group", compressed(20, 64, 4, 2))
    collect(tensors, golden, "asym", compressed(20, 64, 4, 2, sym=False))
    collect(tensors, golden, "order", compressed(8, 128, 4, 4, sym=False, order=True))
    collect(tensors, golden, "channel", compressed(8, 36, 4, 1, half=True))
    # One of the first group of bits only, as mixed checkpoints have.
    collect(tensors, golden, "eight", compressed(8, 64, 8, 1))
    groups = {
        "group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}},
        "group_1": {"targets": ["re:.*eight"], "weights": {"num_bits": 8, "type": "int", "strategy": "channel"}},
    }
    folder("packed", {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}, tensors, golden)

    q = rng.integers(-127, 128, (12, 64)).astype(np.int8)
    stored, scales = bf16(rng.uniform(0.001, 0.02, (12, 1)))
    tensors = {"channel.weight": q, "channel.weight_scale": stored, "channel.input_scale": np.ones(1, dtype=np.float32)}
    golden = {"channel.weight": scales * q}
    weights = {"num_bits": 8, "type": "int", "strategy": "channel"}
    config = {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {"group_0": {"weights": weights}}}
    folder("int8", config, tensors, golden)


def make_fp8():
    tensors, golden = {}, {}
    bytes_ = random_e4m3((24, 40))
    scale = np.array([0.037], dtype=np.float32)
    tensors |= {"tensor.weight": Typed("F8_E4M3", bytes_), "tensor.weight_scale": scale, "tensor.input_scale": scale}
    golden["tensor.weight"] = scale * E4M3[bytes_]
    stored, scales = bf16(rng.uniform(0.001, 0.02, (24, 1)))
    tensors |= {"channel.weight": Typed("F8_E4M3", bytes_), "channel.weight_scale": stored}
    golden["channel.weight"] = scales * E4M3[bytes_]
    tensors |= {"two.weight": Typed("F8_E4M3", bytes_), "two.weight_scale": np.array(0.25, dtype=np.float32)}
    golden["two.weight"] = 0.25 * E4M3[bytes_]
    weights = {"num_bits": 8, "type": "float", "strategy": "channel"}
    config = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": {"weights": weights}}}
    folder("fp8", config, tensors, golden)

    # 5 × 7 blocks stand for 128 × 128 ones; neither size divides.
    bytes_ = random_e4m3((13, 20))
    scales = rng.uniform(0.001, 0.02, (3, 3)).astype(np.float32)
    spread = np.repeat(np.repeat(scales, 5, axis=0)[:13], 7, axis=1)[:, :20]
    tensors = {"block.weight": Typed("F8_E4M3", bytes_), "block.weight_scale_inv": scales}
    folder("fp8-block", {"quant_method": "fp8", "weight_block_size": [5, 7]}, tensors, {"block.weight": spread * E4M3[bytes_]})


def make_fp4():
    nibbles = rng.integers(0, 16, (2, 6, 64))
    packed = (nibbles[..., ::2] | nibbles[..., 1::2] << 4).astype(np.uint8)
    exponents = rng.integers(110, 130, (2, 6, 2)).astype(np.uint8)
    scales = np.ldexp(np.float32(1), exponents.astype(np.int32) - 127)
    tensors = {"experts.down_proj_blocks": packed.reshape(2, 6, 2, 16), "experts.down_proj_scales": exponents}
    golden = {"experts.down_proj_blocks": np.repeat(scales, 32, axis=2) * E2M1[nibbles]}
    folder("mxfp4", {"quant_method": "mxfp4"}, tensors, golden)

    scales = random_e4m3((6, 4)) & 0x7F
    factor = np.array([2000.0], dtype=np.float32)
    tensors = {
        "w.weight_packed": packed[0],
        "w.weight_scale": Typed("F8_E4M3", scales),
        "w.weight_global_scale": factor,
        "w.input_global_scale": factor,
    }
    golden = {"w.weight": np.repeat(E4M3[scales] / factor, 16, axis=1) * E2M1[nibbles[0]]}
    folder("nvfp4", {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, tensors, golden)


make_gptq()
make_awq()
make_compressed()
make_fp8()
make_fp4()
