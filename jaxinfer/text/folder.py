"""Read a tokenizer from a Hugging Face model folder."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import sentencepiece
import tokenizers
from tokenizers import decoders, models

from jaxinfer.text.backends import AddedToken, Backend, SentencePieceBackend, TokenizersBackend
from jaxinfer.text.pretokenizers import PRE_TOKENIZERS
from jaxinfer.text.vocabulary import Vocabulary

_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
# The rule that goes with vocab.json and merges.txt is in no file, only in the class that the folder names.
_RULE_OF_CLASS = {"GPT2Tokenizer": "gpt-2", "GPT2TokenizerFast": "gpt-2", "Qwen2Tokenizer": "qwen2"}
_RULE_OF_CLASS |= {"Qwen2TokenizerFast": "qwen2"}


def read_folder_vocabulary(folder: Path) -> Vocabulary:
    """Read the tokenizer files of a folder.

    Args:
        folder: holds tokenizer.json, else tokenizer.model, else vocab.json and merges.txt.

    Returns:
        The vocabulary with its backend, BOS rule and chat templates.

    Raises:
        FileNotFoundError: none of those files is there.
        ValueError: a file that cannot be read or asks for what is not supported.
    """
    config = _read_json(folder / "tokenizer_config.json")
    special_tokens = _special_tokens(folder, config)
    added = _added_tokens(folder, config)
    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()
    if (folder / "tokenizer.json").is_file():
        tokenizer = _load_tokenizer_json(folder / "tokenizer.json")
        prefix, suffix = _post_processor_affixes(tokenizer)
        backend: Backend = _with_added(tokenizer, special_tokens, added)
    elif (folder / "tokenizer.model").is_file():
        processor = _load_sentencepiece(folder / "tokenizer.model")
        special_tokens = _special_pieces(processor) | special_tokens
        backend = _sentencepiece(processor, special_tokens, added, config)
        config = {"add_bos_token": True} | config
    elif (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        backend = _with_added(_byte_level_bpe(folder, config), special_tokens, added)
    else:
        raise FileNotFoundError(
            f"{folder} holds no tokenizer: looked for tokenizer.json, tokenizer.model, vocab.json with merges.txt"
        )
    bos, eos = (_token_id(backend, special_tokens, role) for role in ("bos_token", "eos_token"))
    # What tokenizer.json itself adds wins over the configuration, as in transformers.
    if not prefix and not suffix:
        prefix = (bos,) if config.get("add_bos_token") and bos is not None else ()
        suffix = (eos,) if config.get("add_eos_token") and eos is not None else ()
    return Vocabulary(
        backend=backend,
        special_tokens=special_tokens,
        eos_ids=() if eos is None else (eos,),
        prefix_ids=prefix,
        suffix_ids=suffix,
        chat_templates=_chat_templates(folder, config),
    )


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected an object, got {type(content).__name__}")
    return content


def _special_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    older = _read_json(folder / "special_tokens_map.json")
    found = {role: config.get(role) or older.get(role) for role in _ROLES}
    texts = {role: token["content"] if isinstance(token, dict) else token for role, token in found.items()}
    return {role: text for role, text in texts.items() if text}


def _added_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the properties of each added token by its text, `id` among them."""
    listed = config.get("added_tokens_decoder") or {}
    tokens = {token["content"]: token | {"id": int(token_id)} for token_id, token in listed.items()}
    older = _read_json(folder / "added_tokens.json")
    return {text: {"id": token_id, "special": False} for text, token_id in older.items()} | tokens


def _load_tokenizer_json(path: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{path}: not a tokenizer that the tokenizers library reads: {error}") from error


def _post_processor_affixes(tokenizer: tokenizers.Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ids that the file's own post-processor puts before and after a text, found by trying one."""
    plain = tokenizer.encode("a", add_special_tokens=False).ids
    full = tokenizer.encode("a", add_special_tokens=True).ids
    extra = len(full) - len(plain)
    start = next((i for i in range(extra + 1) if full[i : i + len(plain)] == plain), 0)
    return tuple(full[:start]), tuple(full[start + len(plain) :])


def _with_added(
    tokenizer: tokenizers.Tokenizer, special_tokens: Mapping[str, str], added: Mapping[str, dict[str, Any]]
) -> TokenizersBackend:
    """Add what the configuration names and the tokenizer's own file does not, as transformers does."""
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    properties = ("single_word", "lstrip", "rstrip", "normalized", "special")
    missing = [
        tokenizers.AddedToken(text, **{name: token[name] for name in properties if name in token})
        for text, token in sorted(added.items(), key=lambda item: item[1]["id"])
        if text not in known
    ]
    known |= added.keys()
    roles = [text for text in dict.fromkeys(special_tokens.values()) if text not in known]
    tokenizer.add_tokens(missing)
    tokenizer.add_special_tokens([tokenizers.AddedToken(text, normalized=False) for text in roles])
    for text, token in added.items():
        if tokenizer.token_to_id(text) != token["id"]:
            raise ValueError(
                f"added token {text!r}: the configuration says id {token['id']}, "
                f"the tokenizer has {tokenizer.token_to_id(text)}"
            )
    return TokenizersBackend(tokenizer)


def _load_sentencepiece(path: Path) -> sentencepiece.SentencePieceProcessor:
    try:
        return sentencepiece.SentencePieceProcessor(model_proto=path.read_bytes())
    except RuntimeError as error:
        raise ValueError(f"{path}: not a SentencePiece model: {error}") from error


def _special_pieces(processor: sentencepiece.SentencePieceProcessor) -> dict[str, str]:
    ids = {"bos_token": processor.bos_id(), "eos_token": processor.eos_id(), "unk_token": processor.unk_id()}
    return {role: processor.id_to_piece(token_id) for role, token_id in ids.items() if token_id >= 0}


def _sentencepiece(
    processor: sentencepiece.SentencePieceProcessor,
    special_tokens: Mapping[str, str],
    added: Mapping[str, dict[str, Any]],
    config: Mapping[str, Any],
) -> SentencePieceBackend:
    pieces = range(processor.get_piece_size())
    special_pieces = (i for i in pieces if processor.is_control(i) or processor.is_unknown(i))
    own = {processor.id_to_piece(i): AddedToken(i) for i in special_pieces}
    special = set(special_tokens.values())
    named = {
        text: AddedToken(
            token_id=token["id"],
            special=token.get("special", False) or text in special,
            lstrip=token.get("lstrip", False),
            rstrip=token.get("rstrip", False),
        )
        for text, token in added.items()
    }
    model = processor.serialized_model_proto()
    return SentencePieceBackend(model, own | named, prefix_every=bool(config.get("legacy", False)))


def _byte_level_bpe(folder: Path, config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    name = config.get("tokenizer_class", "GPT2Tokenizer")
    if name not in _RULE_OF_CLASS:
        raise ValueError(
            f"{folder}: tokenizer_class {name!r} with vocab.json and merges.txt is not supported, only "
            f"{', '.join(sorted(_RULE_OF_CLASS))}; save the tokenizer as tokenizer.json"
        )
    if config.get("add_prefix_space"):
        raise ValueError(f"{folder}: add_prefix_space needs a tokenizer.json, vocab.json is not enough")
    rule = PRE_TOKENIZERS[_RULE_OF_CLASS[name]]
    try:
        bpe = models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt"))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{folder}: vocab.json and merges.txt are not a vocabulary: {error}") from error
    tokenizer = tokenizers.Tokenizer(bpe)
    if (normalizer := rule.normalizer()) is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = rule.build()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _token_id(backend: Backend, special_tokens: Mapping[str, str], role: str) -> int | None:
    text = special_tokens.get(role)
    return None if text is None else backend.token_to_id(text)


def _chat_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Collect the templates from every place they may be in; a file of its own wins."""
    found = _named_templates(config.get("chat_template"))
    found |= _named_templates(_read_json(folder / "chat_template.json").get("chat_template"))
    if (path := folder / "chat_template.jinja").is_file():
        found["default"] = path.read_text(encoding="utf-8")
    more = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    return found | {path.stem: path.read_text(encoding="utf-8") for path in more}


def _named_templates(value: object) -> dict[str, str]:
    match value:
        case None:
            return {}
        case str():
            return {"default": value}
        case dict():
            return {str(name): str(template) for name, template in value.items()}
        case list():
            return {entry["name"]: entry["template"] for entry in value}
        case _:
            raise ValueError(f"chat_template: got {type(value).__name__}, expected a string or named ones")
