"""From the recipe's model section to a Hugging Face config, with every fault named before any process group exists.

Nothing is fetched and no code of a model folder is run: the folder's `config.json` is read as the plain file it is.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, GenerationConfig, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from fedshard.core.errors import Fault, InputError
from fedshard.core.recipe import ConfigModel, FolderModel
from fedshard.engine.initial import read_initials
from fedshard.engine.model import build_on_meta, decoder_blocks
from fedshard.engine.weights import has_weights, plan_weights

ALIKE = 0.6  # from this likeness on, a name is worth suggesting
MISSPELT = 0.9  # from this likeness on, a key of a config.json that nothing reads is taken for a slip

COMMON_FIELDS = frozenset(field.name for field in dataclasses.fields(PreTrainedConfig)) - {"is_encoder_decoder"}
COMMON_KEYWORDS = frozenset(
    {"torch_dtype", "num_labels", "name_or_path", "output_attentions", "attn_implementation", "experts_implementation"}
)
NO_SHAPE = COMMON_FIELDS | COMMON_KEYWORDS
"""What every config takes, and what says nothing about the architecture."""


def read_config(model: ConfigModel | FolderModel) -> PreTrainedConfig:
    """The config of the recipe's model. Raises InputError with all its faults.

    Refused are architectures that transformers does not know or that are no decoder-only language models, fields
    that the architecture does not have (transformers takes any, and says nothing), values that it rejects, a model
    that cannot be built, cut into units or initialised, and a folder whose weights do not fit its config.
    """
    return _from_folder(Path(model.path)) if isinstance(model, FolderModel) else _from_fields(model)


def check_positions(config: PreTrainedConfig, sequence_length: int) -> Fault | None:
    """What is wrong with training `config` on sequences of so many tokens, if anything."""
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)  # none: no limit, as with ALiBi
    if positions is None or sequence_length <= positions:
        return None
    return Fault(
        "data.sequence_length",
        f"{sequence_length} tokens, and the model has {positions} positions",
        f"Set data.sequence_length to at most {positions}, or give the model more positions.",
    )


def _from_fields(model: ConfigModel) -> PreTrainedConfig:
    kind = _architecture(model.model_type, "model.model_type")
    unknown = _unknown_fields(kind, model.fields)
    known = {name: value for name, value in model.fields.items() if name not in unknown}
    faults = list(unknown.values())
    try:
        config = _construct(kind, _tokens_within_vocabulary(kind, known), "model")
        _check_model(config, "model", trained=False)
    except InputError as error:
        raise InputError([*faults, *error.faults]) from None
    if faults:
        raise InputError(faults)
    return config


def _from_folder(folder: Path) -> PreTrainedConfig:
    file = folder / "config.json"
    if not file.is_file():
        says = f"no config.json in {folder}" if folder.is_dir() else f"no folder {folder}"
        raise InputError([Fault("model.path", says, "Give a Hugging Face model folder.")])
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError([Fault(str(file), f"cannot be read ({error})", "Give a readable JSON file.")]) from None
    kind = _architecture(raw.pop("model_type", None), str(file))
    faults = list(_slips(kind, raw, str(file)))
    if raw.get("quantization_config"):
        faults.append(Fault(str(file), "the weights are quantised", "Give a folder with float weights."))
    if faults:
        raise InputError(faults)
    config = _construct(kind, raw, str(file))
    trained = has_weights(folder)
    _check_model(config, str(file), trained=trained)
    if trained:
        plan_weights(config, folder)
    return config


def _architecture(model_type: object, key: str) -> type[PreTrainedConfig]:
    """The config class of a `model_type` that is a language model. Raises InputError where it is none."""
    if model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return CONFIG_MAPPING[str(model_type)]
    nearest = difflib.get_close_matches(str(model_type), MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, 1, ALIKE)
    known = model_type in CONFIG_MAPPING
    says = f"{model_type!r} is no causal language model" if known else f"transformers knows no {model_type!r}"
    some = "Take one that it knows, such as llama, qwen3, gpt2 or mixtral; code in a model's folder is never run."
    raise InputError([Fault(key, says, f"Did you mean {nearest[0]}?" if nearest else some)])


def _ignored(kind: type[PreTrainedConfig], given: Iterable[tuple[str, Any]]) -> list[str]:
    """The names in `given` that the architecture has no use for.

    Of the keywords that are none of its fields, a config class takes away those that it knows from older files
    (`rope_theta`), drops those of text generation, and keeps all others as attributes that nothing reads.
    """
    fields = {*_names(kind), *kind.attribute_map}
    strange = {name: value for name, value in given if name not in fields}
    try:
        kept = vars(kind(**strange))
    except Exception:  # a value that it rejects is no name that it ignores; building the whole config tells
        kept = {}
    generation = vars(GenerationConfig())
    return [name for name in strange if name in kept or name in generation or name in NO_SHAPE]


def _unknown_fields(kind: type[PreTrainedConfig], given: dict[str, Any]) -> dict[str, Fault]:
    """Faults for a recipe's fields that the architecture does not have, by name."""
    own = [*(name for name in _names(kind) if name not in NO_SHAPE), *kind.attribute_map]
    unknown = [*_ignored(kind, given.items()), *(name for name in given if name in NO_SHAPE)]
    nearest = {name: difflib.get_close_matches(name, own, 1, ALIKE) for name in unknown}
    return {
        name: Fault(
            f"model.{name}",
            f"{kind.model_type} has no such field",
            f"Did you mean model.{near[0]}?" if near else f"Its fields are {', '.join(own)}.",
        )
        for name, near in nearest.items()
    }


def _slips(kind: type[PreTrainedConfig], raw: dict[str, Any], key: str) -> Iterator[Fault]:
    """Faults for keys of a config.json that are a field misspelt; files of real models hold others that none reads."""
    absent = [name for name in (*_names(kind), *kind.attribute_map) if name not in raw]
    for name in _ignored(kind, raw.items()):
        for nearest in difflib.get_close_matches(name, absent, 1, MISSPELT):
            yield Fault(key, f"{kind.model_type} has no field {name}", f"Did you mean {nearest}?")


def _names(kind: type[PreTrainedConfig]) -> list[str]:
    """The fields of a config class that are meant for others than itself."""
    return [field.name for field in dataclasses.fields(kind) if not field.name.startswith("_")]


def _tokens_within_vocabulary(kind: type[PreTrainedConfig], given: dict[str, Any]) -> dict[str, Any]:
    """`given`, and None for the architecture's own special tokens where the vocabulary given is too small for them."""
    defaults = {field.name: field.default for field in dataclasses.fields(kind)}
    size = given.get("vocab_size", defaults.get("vocab_size"))
    special = {name: value for name, value in defaults.items() if name.endswith("_token_id")}
    beyond = [
        name for name, value in special.items() if isinstance(value, int) and isinstance(size, int) and value >= size
    ]
    return dict.fromkeys(beyond) | given


def _construct(kind: type[PreTrainedConfig], given: dict[str, Any], key: str) -> PreTrainedConfig:
    """The config. Raises InputError with what its class has against the values."""
    try:
        return kind(**given)
    except Exception as error:  # whatever a class of transformers does with a user's values is theirs to mend
        raise InputError([_rejected(key, kind.model_type, error)]) from None


def _check_model(config: PreTrainedConfig, key: str, *, trained: bool) -> None:
    """Raises InputError where the model cannot be built, cut into units or, if not trained yet, initialised."""
    if config.is_encoder_decoder:
        raise InputError([Fault(key, f"{config.model_type} is an encoder-decoder model", "Take a decoder-only one.")])
    try:
        model = build_on_meta(config)
    except Exception as error:  # as in _construct
        raise InputError([_rejected(key, config.model_type, error)]) from None
    causal = any(getattr(module, "is_causal", False) for module in model.modules())
    if getattr(config, "is_decoder", True) is False and not causal:
        says = f"{config.model_type} attends to later tokens too"
        raise InputError([Fault(key, says, "Set is_decoder = true, or take another architecture.")])
    text = config.get_text_config()
    heads, shared = (getattr(text, name, None) for name in ("num_attention_heads", "num_key_value_heads"))
    if heads and shared and heads % shared:
        says = f"{heads} query heads cannot share {shared} key and value heads evenly"
        raise InputError([Fault(f"{key}.num_key_value_heads", says, "Give a divisor of num_attention_heads.")])
    decoder_blocks(model)
    initials = read_initials(config)
    if not trained:
        initials.check()


def _rejected(key: str, model_type: str, error: Exception) -> Fault:
    reason = " ".join(str(error.__cause__ or error).split()) or type(error).__name__
    return Fault(key, f"{model_type} does not take these values ({reason})", "Mend the value it names.")
