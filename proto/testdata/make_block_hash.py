#!/usr/bin/env python3
"""Writes block_hash.txt from the definition in src/block_hash.rs. Fields: adapter|salt hex|block size|ids|root and block hashes."""
import hashlib
import struct


def cut(*parts):
    return hashlib.sha256(b"".join(parts)).digest()[:16]


def case(adapter, salt, block, ids):
    name = adapter.encode()
    h = cut(b"quire.block.v1", struct.pack("<I", len(name)), name, struct.pack("<I", len(salt)), salt)
    out = [h]
    for i in range(0, len(ids) - block + 1, block):
        h = cut(h, struct.pack(f"<{block}I", *ids[i : i + block]))
        out.append(h)
    return "|".join([adapter, salt.hex(), str(block), " ".join(map(str, ids)), " ".join(x.hex() for x in out)])


print("# made by make_block_hash.py")
print(case("", b"", 16, []))
print(case("", b"", 16, list(range(16))))
print(case("", b"", 16, list(range(40))))
print(case("sql-expert", b"", 4, [1, 2, 3, 4, 5, 6, 7, 8]))
print(case("", b"\x00\x01tenant", 4, [1, 2, 3, 4, 5, 6, 7, 8]))
print(case("é", b"\xff" * 32, 1, [0, 4294967295, 49151]))
print(case("", b"", 32, [7] * 65))
