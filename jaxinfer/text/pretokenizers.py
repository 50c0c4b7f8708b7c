"""How byte-level BPE vocabularies split a text before merging, by the name that GGUF files give the rule.

The patterns are those of the models' own tokenizer.json; the names are llama.cpp's (src/llama-vocab.cpp).
"""

from collections.abc import Callable
from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers

_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_PUNCTUATION_AND_SPACE = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS_THREE_DIGITS = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _PUNCTUATION_AND_SPACE
_WORDS_ONE_DIGIT = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _PUNCTUATION_AND_SPACE

# Words by case: an upper-case run before a lower-case run, either of them optional but not both.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _cased_words(contraction: str, digits: str) -> str:
    before = r"[^\r\n\p{L}\p{N}]?"
    lower = f"{before}{_UPPER}*{_LOWER}+{contraction}"
    upper = f"{before}{_UPPER}+{_LOWER}*{contraction}"
    return f"{lower}|{upper}|{digits}{_CASED_TAIL}"


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _single_digits_then_gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _split(pattern: str) -> Callable[[], pre_tokenizers.PreTokenizer]:
    def build() -> pre_tokenizers.PreTokenizer:
        split = pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False)
        return pre_tokenizers.Sequence(
            [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )

    return build


@dataclass(frozen=True)
class PreTokenizerRule:
    """What comes before the merges, and two defaults that go with it.

    Attributes:
        build: makes the `tokenizers` pre-tokeniser.
        nfc: the text is put into Unicode's composed form first.
        ignore_merges: a word that is itself a token is taken whole, whatever the merges would make of it.
        adds_bos: BOS is added where the file does not say.
    """

    build: Callable[[], pre_tokenizers.PreTokenizer]
    nfc: bool = False
    ignore_merges: bool = False
    adds_bos: bool = False

    def normalizer(self) -> normalizers.Normalizer | None:
        """Return the `tokenizers` normaliser, None for none."""
        return normalizers.NFC() if self.nfc else None


_GPT2 = PreTokenizerRule(_gpt2)
_SMOLLM = PreTokenizerRule(_single_digits_then_gpt2)
_LLAMA3 = PreTokenizerRule(_split(_WORDS_THREE_DIGITS), ignore_merges=True, adds_bos=True)
_CL100K = PreTokenizerRule(_split(_WORDS_THREE_DIGITS))
_QWEN2 = PreTokenizerRule(_split(_WORDS_ONE_DIGIT), nfc=True)

PRE_TOKENIZERS: dict[str, PreTokenizerRule] = {
    "gpt-2": _GPT2,
    "phi-2": _GPT2,
    "olmo": PreTokenizerRule(_gpt2, nfc=True),
    "smollm": _SMOLLM,
    "starcoder": _SMOLLM,
    "refact": _SMOLLM,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "dbrx": _CL100K,
    "smaug-bpe": _CL100K,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "stablelm2": _QWEN2,
    "tekken": PreTokenizerRule(_split(_cased_words("", r"\p{N}")), ignore_merges=True, adds_bos=True),
    "gpt-4o": PreTokenizerRule(_split(_cased_words(_CONTRACTION + "?", r"\p{N}{1,3}"))),
}


def find_pre_tokenizer(name: object) -> PreTokenizerRule:
    """Look a rule up by its GGUF name.

    Args:
        name: the value of `tokenizer.ggml.pre`.

    Returns:
        The rule.

    Raises:
        ValueError: a name that is not in the table, or none at all.
    """
    if isinstance(name, str) and name in PRE_TOKENIZERS:
        return PRE_TOKENIZERS[name]
    raise ValueError(
        f"tokenizer.ggml.pre: got {name!r}, supported are {', '.join(sorted(PRE_TOKENIZERS))}; "
        "load the model from its Hugging Face folder instead, or convert it again with a newer converter"
    )
