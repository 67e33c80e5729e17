"""Writes the tokenizer fixtures: small byte-level BPE tokenizers as published models hold them, and what the
`tokenizers` package makes of some texts.

    .venv/bin/python tests/io/tokenizers/generate.py

One folder a family: tokenizer.json, and expected.json with [{text, ids, decoded}]: ids without what the post-processor
adds, whose front part is under prefix. All have one vocabulary, trained on the Python standard library's sources and
the texts below in pieces that end anywhere, so that many merges reach across words: only the right cuts give the right
tokens.
"""

import json
import pathlib
import sysconfig

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

FOLDER = pathlib.Path(__file__).parent
SOURCES = ["argparse.py", "ast.py", "asyncio/events.py", "email/message.py", "json/encoder.py", "typing.py"]
# So that the vocabularies have tokens of several bytes and of parts of characters.
TEXTS = """春眠不觉晓，处处闻啼鸟。夜来风雨声，花落知多少。模型的注意力只看见压缩的潜在向量。
今日は天気がいいから、散歩しましょう。안녕하세요 세계. Съешь ещё этих мягких французских булок.
Ça va? Où êtes-vous? Die Straße, größer als übermäßig. ¿Qué pasó? 👩‍💻👍🏽🎉 12345 67890 3.14159
"""

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
          r"|\s+(?!\S)|\s+")
QWEN2 = LLAMA3.replace("{1,3}", "")
DEEPSEEK_V3 = [
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"""| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+""",
]
DEEPSEEK_V2 = [
    r"[\r\n]",
    r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-Ֆ]+",
    r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
    r"\s+$",
    r"[一-龥ࠀ-一가-퟿]+",
]
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
KIMI = "|".join([r"[\p{Han}]+", rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
                 rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*(?i:'s|'t|'re|'ve|'m|'ll|'d)?", r"\p{N}{1,3}",
                 r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"])

CASES = [
    "", " ", "  ", "a", "Hello, world!", "It's what they'd say: WE'LL SEE, IT'S 'S 'ſ.", "an  end in  spaces   ",
    "\n", "\r\n", "a\nb\r\nc\rd\n\n\ne \n f\n  g\t\th\v\fi", "\t \t  x",
    "x\u00a0y\u2003z\u3000w\u180ev\u0085u\u200bt\u2028s", "1", "12", "123", "1234567890",
    "3.14159e-10 and 1,234,567.89", "٣٤٥ ⅷ ½ ²³ ①", "v2.0.1-rc3+build.5",
    "def f(x: int = 0) -> list[str]:\n    return [str(i) for i in range(x)]  # comment\n\n\nclass A(B):\n\tpass\n",
    "if(a&&b||!c){d[e]=*f->g;}//h\n/* <i> </i> */", "https://example.org/a_b?c=d&e=%20f#g",
    "\\d+\\s*[^\\]\\\\]{2,3}|$^`~'\"", "春眠不觉晓，处处闻啼鸟。夜来风雨声，花落知多少。", "混合 English 和中文123个字。第①章", "ひらがなカタカナ漢字。ー々",
    "안녕하세요, 세계!", "𠀀𠮷野家 㐀 豈", "Съешь ещё этих мягких французских булок",
    "Ça va? Où êtes-vous? größer als Straße ŸẞĲ ǅ ʰ ª", "नमस्ते दुनिया", "مرحبا بالعالم", "שלום עולם", "สวัสดีชาวโลก",
    "e\u0301 o\u0308\u0304 a\u0300\u0301\u0302 \u0301x", "é \u212b \u1e9b\u0323 \uac00 \u1100\u1161",
    "👍 👍🏽 👩‍💻 🏴‍☠️ 🇩🇪🇫🇷 ☺️ ❤", "x\u0000y\u0001z\u001b[0m\u007f", "\ufeffbom \ufffd \ufdd0 \uffff \ue000 \U0010ffff",
    "∑∫√≈ €£¥ «» “quotes” … – —",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "-" * 70 + "=" * 33, "<|begin|>", "a<|begin|>b", "a <|begin|> b<|end|><|end|>\n", "<|begin|", "<|tool|> <|tool|>",
    "   <|strip|>   x<|strip|>\n y", "word WORD words word", "(word) wordy word_ word", "caf\u00e9 cafe\u0301",
    "<|begin|><|begin|>", "<|b<|begin|>egin|>", "<|beginning|>", "<|begin|>ning|>",
]


def split(pattern):
    return pre_tokenizers.Split(Regex(pattern), "isolated")


def byte_level(**options):
    return pre_tokenizers.ByteLevel(**{"add_prefix_space": False, "use_regex": False, **options})


def begins(tokenizer):
    return processors.TemplateProcessing(single="<|begin|> $A", pair="<|begin|> $A <|begin|> $B",
                                         special_tokens=[("<|begin|>", tokenizer.token_to_id("<|begin|>"))])


# Each: pre-tokenizers, and what else differs.
FAMILIES = {
    "gpt2": dict(pre=[byte_level(use_regex=True)], legacy_merges=True,
                 post=lambda t: processors.ByteLevel(trim_offsets=False)),
    "prefix_space": dict(pre=[pre_tokenizers.Punctuation(), byte_level(use_regex=True, add_prefix_space=True)],
                         post=lambda t: processors.RobertaProcessing(("<|end|>", 1), ("<|begin|>", 0))),
    "deepseek_v2": dict(pre=[*map(split, DEEPSEEK_V2), pre_tokenizers.Digits(individual_digits=True), byte_level()],
                        legacy_merges=True, normalizer=normalizers.Sequence([]), post=begins),
    "deepseek_v3": dict(pre=[*map(split, DEEPSEEK_V3), byte_level()], normalizer=normalizers.Sequence([])),
    "llama3": dict(pre=[split(LLAMA3), byte_level()], ignore_merges=True,
                   post=lambda t: processors.Sequence([processors.ByteLevel(trim_offsets=False), begins(t)])),
    "kimi": dict(pre=[split(KIMI), byte_level()]),
    "qwen2": dict(pre=[split(QWEN2), byte_level()], normalizer=normalizers.NFC()),
}


def train():
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split(r"[^\n]{1,12}|\s{1,3}"), byte_level()])
    library = pathlib.Path(sysconfig.get_paths()["stdlib"])
    corpus = [(library / name).read_text() for name in SOURCES] + [TEXTS] * 40
    trainer = trainers.BpeTrainer(vocab_size=1000, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
                                  special_tokens=["<|begin|>", "<|end|>"], show_progress=False)
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken("<|tool|>", special=False, normalized=False),
                          AddedToken("<|strip|>", lstrip=True, rstrip=True, normalized=False),
                          AddedToken("word", single_word=True, normalized=True), AddedToken("café", normalized=True),
                          AddedToken("<|beginning|>", normalized=False)])
    return tokenizer.to_str()


def family_file(trained, pre, normalizer=None, ignore_merges=False, post=None, legacy_merges=False):
    tokenizer = tokenizers.Tokenizer.from_str(trained)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(pre) if len(pre) > 1 else pre[0]
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if post is not None:
        tokenizer.post_processor = post(tokenizer)
    file = json.loads(tokenizer.to_str())
    if ignore_merges:  # words whose merges are missing
        file["model"]["ignore_merges"] = True
        file["model"]["merges"] = file["model"]["merges"][:400]
    if legacy_merges:
        file["model"]["merges"] = [" ".join(merge) for merge in file["model"]["merges"]]
    return json.dumps(file, ensure_ascii=False, separators=(",", ":")) + "\n"


def main():
    trained = train()
    for name, family in FAMILIES.items():
        folder = FOLDER / name
        folder.mkdir(exist_ok=True)
        (folder / "tokenizer.json").write_text(family_file(trained, **family))
        tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        cases = []
        for text in CASES:
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            decoded = tokenizer.decode(ids, skip_special_tokens=False)
            # `tokenizers` takes the letters of added tokens for bytes: café loses its é.
            cases.append(dict(text=text, ids=ids, decoded=None if "\ufffd" in decoded and "caf" in text else decoded))
        prefix = tokenizer.encode("", add_special_tokens=True).ids
        origin = f"tests/io/tokenizers/generate.py, tokenizers {tokenizers.__version__}"
        lines = ",\n".join(json.dumps(case, ensure_ascii=True) for case in cases)
        (folder / "expected.json").write_text(
            f'{{"origin": {json.dumps(origin)}, "prefix": {json.dumps(prefix[:1])}, "cases": [\n{lines}]}}\n')
        print(name, tokenizer.get_vocab_size(), "tokens, prefix", prefix)


if __name__ == "__main__":
    main()
