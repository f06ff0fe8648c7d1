#!/usr/bin/env python3
"""What Hugging Face's `tokenizers` makes of hostile strings, for `router/src/text/hostile_tests.rs`.

    python make_hostile.py [RANDOM]    # with RANDOM more random strings; writes hostile.json

Needs the Python package tokenizers 0.23. Its splitting patterns run on Oniguruma, ours on another engine: that is what
this compares.
"""

import json
import pathlib
import random
import sys

from tokenizers import Tokenizer

HERE = pathlib.Path(__file__).parent
NAMES = ["main", "llama3", "gpt2", "spm-bpe", "unigram", "wordpiece"]

STRINGS = [
    "", " ", "  ", "\t", "\n", "\r\n", "\n\n\n", " \n ", "\u00a0", "\u2003\u3000", "\u0085", "\u200b", "\ufeff", "\ufeffabc", "a\ufeffb",
    "\x00", "a\x00b", "\x01\x02\x1b[31m", "\x7f", "\u0080", "\ufffd", "\ufffe", "\uffff", "\U0010ffff", "\U000e0001",
    "😀", "😀😀", "👍🏽", "👩‍👩‍👧‍👦", "🇨🇭🇨", "❤️", "🏴\U000e0067\U000e0062\U000e007f", "1️⃣", "\u200d", "\ufe0f", "a\u200db",
    "é", "e\u0301", "e\u0301\u0301\u0301", "\u0301", " \u0301", "Å\u212bA\u030a", "ﬁﬀ", "ǅ", "ß", "İstanbul", "ſ", "Ⅷ½²③", "\u1e9b\u0323",
    "가각", "\u1100\u1161\u11a8", "Zalgo: H\u0337\u0313\u0357e\u0336\u0344l\u0335p",
    "שלום עולם", "مرحبا بالعالم", "\u202eevil\u202c", "\u2066x\u2069", "ﷺ", "١٢٣٤٥", "हिन्दी १२३", "ไทยไม่มีช่องว่าง", "ᚠᛇᚻ", "𐑏𝒜𝟗", "日本語テキスト、漢字。", "中文123abc", "한국어 띄어쓰기",
    "don't DON'T I'LL we've 'tis ''s 's", "it’s", "a'b'c", "x's1't2", "1234567890", "1,234.56", "0x1F", "1e-9", "-1", "3.14159265358979", "12 345 6789", "a1b22c333d4444",
    "!!!???...", "-----=====", "((()))[]{}", "\"'`´", "$€£¥", "<>&|", "a.b,c;d", "/usr/bin/x", "http://a.b/c?d=e&f#g", "x_y-z", "CamelCaseWords", "snake_case_words", "ALLCAPS", "mIxEd",
    "<|im_start|>", "<|im_end|>", "x<|im_end|>y", "<|im_end|><|im_start|>", "<|im_", "<|im_end", "im_end|>", "<|im_end|> ", " <|im_end|>", "<|bos|><|eos|><|pad|>", "<s>", "</s>", "<unk>", "<pad>", "<mask>", " <mask>", "[CLS]", "[SEP] [MASK]", "<|IM_END|>", "<|im_end |>", "<|im​_end|>",
    "<0x0A>", "<0xE2><0x96><0x81>", "▁", "▁▁a", "a▁b", "Ġ", "ĠaĊb", "##a", "Ã©",
    "def f(x):\n    return x  # comment\n\n\nclass A:\n\tpass\n", "{\"a\": [1, 2, {\"b\": null}]}", "<html><body>&nbsp;</body></html>", "SELECT * FROM t WHERE a='b' -- c\n",
    " leading", "trailing ", "  two  spaces  ", "\tx\ty\t", "a \n b", "a\n \nb", "a\r\rb", "a\u2028b\u2029c", "x \u00a0 y", "a\u180eb", "a\u1680b", "\x1c\x1d\x1e\x1f", "a\x0bb\x0cc",
    "The quick brown fox jumps over the lazy dog.", "Hello, world!", "naïve café résumé coöperate", "Привет, мир! Ёж.", "Ελληνικά Σίσυφος ΣΑΣ", "Türkçe ışığı", "Việt Nam", "ქართული", "Հայերեն", "አማርኛ", "বাংলা", "தமிழ்", "မြန်မာ", "ខ្មែរ", "ᠮᠣᠩᠭᠣᠯ", "ⲕⲟⲡⲧ",
]
# (text, how often)
RUNS = [("a", 3000), (" ", 3000), ("\n", 3000), ("1", 3000), ("!", 3000), ("é", 2000), ("e\u0301", 1500), ("\u0301", 2000), ("😀", 1500), ("語", 2000), ("ab ", 1500), ("a1", 1500), (" \n", 1500), ("<|im_end|>", 300), ("<|im_end|", 300), ("<", 3000), ("▁", 2000), ("👩‍👩‍👧", 400), ("'s", 1500), ("\u200d", 2000)]


def random_strings(count):
    r = random.Random(7)
    pools = [lambda: chr(r.randint(1, 0x7F)), lambda: chr(r.randint(0x80, 0x7FF)), lambda: chr(r.randint(0x800, 0xD7FF)), lambda: chr(r.randint(0xE000, 0xFFFF)), lambda: chr(r.randint(0x10000, 0x1FFFF)), lambda: r.choice(" \n\t.,'"), lambda: r.choice("abcXYZ012")]
    for _ in range(count):
        some = r.sample(pools, r.randint(1, 4))
        yield "".join(r.choice(some)() for _ in range(r.randint(1, 30)))


def digest(ids):
    """FNV-1a of the ids, 64 bits."""
    value = 0xCBF29CE484222325
    for number in ids:
        for byte in number.to_bytes(4, "little"):
            value = ((value ^ byte) * 0x100000001B3) & (2**64 - 1)
    return f"{value:016x}"


def main():
    texts = STRINGS + list(random_strings(int(sys.argv[1]) if len(sys.argv) > 1 else 100))
    out = {"strings": texts, "runs": RUNS, "tokenizers": {}}
    for name in NAMES:
        control = Tokenizer.from_file(str(HERE / name / "tokenizer.json"))
        plain = Tokenizer.from_file(str(HERE / name / "tokenizer.json"))
        plain.encode_special_tokens = True
        ids = lambda tokenizer, text: tokenizer.encode(text, add_special_tokens=False).ids
        out["tokenizers"][name] = {
            "control": [digest(ids(control, text)) for text in texts],
            "plain": [digest(ids(plain, text)) for text in texts],
            "decoded": [digest(list(control.decode(ids(plain, text), skip_special_tokens=False).encode())) for text in texts],
            "runs": [digest(ids(plain, text * times)) for text, times in RUNS],
        }
    lines = json.dumps(out, ensure_ascii=True, separators=(",", ":"))
    (HERE / "hostile.json").write_text(lines + "\n")
    print(len(texts), "strings,", len(RUNS), "runs,", len(lines), "bytes")


if __name__ == "__main__":
    main()
