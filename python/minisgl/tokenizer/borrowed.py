"""The flag `--tokenizer`: the tokenizer of another folder, GGUF file or hub id replaces the model's own.

Invariants: the new folder has every text-related file of both, so code that reads it needs no special case; its name is
a digest of the files' content.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

from minisgl import envs
from minisgl.config import ConfigError, EngineConfig
from minisgl.tokenizer.tokenizer import FILE, FILE_CONFIG, Tokenizer, tokenizer_source
from minisgl.utils.made_once import made_once
from minisgl.utils.progress import Report
from minisgl.weights.sources import find_tokenizer

FORMAT = "1"  # part of the key: a change of what is written makes new folders
OF_SENTENCES = ("modules.json", "1_Pooling/config.json", "config_sentence_transformers.json")
OF_IMAGES = ("preprocessor_config.json", "processor_config.json")
OF_THE_MODEL = ("config.json", "generation_config.json", *OF_IMAGES, *OF_SENTENCES)
OF_THE_TOKENIZER = ("special_tokens_map.json",)
OF_THE_TEMPLATE = ("chat_template.json", "chat_template.jinja")
TEMPLATES = "additional_chat_templates"


def text_folder(config: EngineConfig, folder: Path, vocab_size: int | None, say: Report) -> Path:
    """Return the folder with the tokenizer, chat template and sampling defaults of the model in `folder`. With
    `--tokenizer` it is a new folder with the model's configuration and the other tokenizer; the chat template is the
    tokenizer's, or the model's if that has none. Raises `ConfigError`, also if the tokenizer has text ids beyond the
    model's `vocab_size`."""
    if config.tokenizer is None:
        return folder
    flag = f"--tokenizer {config.tokenizer}"
    other = find_tokenizer(config.tokenizer, say, source=config.model_source)
    tokenizer = Tokenizer.load(other, say)
    beyond = set(range(vocab_size or tokenizer.num_ids, tokenizer.num_ids)) - tokenizer.special_ids
    if beyond:
        raise ConfigError(
            f"{flag}: the tokenizer has {tokenizer.num_ids} ids, the model only {vocab_size} embeddings: "
            "it belongs to another model"
        )
    source = tokenizer_source(other, say)
    templates_of = other if tokenizer.template_source() else folder
    files = {name: folder / name for name in OF_THE_MODEL}
    files |= {name: source / name for name in (FILE, *OF_THE_TOKENIZER)}
    files |= {name: templates_of / name for name in OF_THE_TEMPLATE}
    files |= {f"{TEMPLATES}/{file.name}": file for file in (templates_of / TEMPLATES).glob("*.jinja")}
    files = {name: file for name, file in files.items() if file.is_file()}
    settings = _settings(source, templates_of)
    key = hashlib.sha256(settings.encode())
    for name, file in sorted(files.items()):
        key.update(f"\n{name}\n".encode() + hashlib.sha256(file.read_bytes()).digest())

    def write(partial: Path) -> None:
        for name, file in files.items():
            (partial / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(file, partial / name)
        (partial / FILE_CONFIG).write_text(settings, encoding="utf-8")

    say(f"{flag}: {tokenizer.num_ids} ids, in place of the model's own")
    return made_once(envs.cache_dir() / "borrowed-tokenizers" / f"{key.hexdigest()[:32]}-{FORMAT}", write)


def _settings(source: Path, templates_of: Path) -> str:
    """Return the tokenizer_config.json of `source` with the chat template of `templates_of`."""

    def read(file: Path) -> dict[str, object]:
        return dict(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else {}

    settings = read(source / FILE_CONFIG)
    settings.pop("chat_template", None)
    if template := read(templates_of / FILE_CONFIG).get("chat_template"):
        settings["chat_template"] = template
    return json.dumps(settings, indent=2, ensure_ascii=False)
