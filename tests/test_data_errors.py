"""Bad text, tokenizers and options are one line that says what, where and what to do; and the cache of tokens."""

import contextlib
import errno
import json
import os
import re
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from train.data import DataConfig, DataError, build_data, load_tokenizer, train_batches
from train.data import corpus as corpus_module
from train.data import sources as sources_module
from train.data.config import config_problems
from train.errors import UserError


def write(path: Path, text: str | bytes) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def refused(match: str, seq_len: int = 4, vocab_size: int | None = None, **config) -> None:
    with pytest.raises(DataError, match=match) as info:
        build_data(DataConfig(**config), seq_len, vocab_size)
    assert isinstance(info.value, UserError) and "\n" not in str(info.value)


# Files ------------------------------------------------------------------------------------------------------------

# file name, content, and what is said of it; {path} stands for the path.
BAD_FILES = {
    "empty file": ("a.txt", "", "{path} has no text: leave it out"),
    "no documents": ("a.jsonl", '\n\n{"text": ""}\n', "{path} has no text"),
    "unknown suffix": ("a.xyz", "text", r"{path}: the suffix '\.xyz' .*\.txt, .*\.parquet: say it with --data\.format"),
    "no suffix": ("a", "text", "{path}: the suffix '' "),
    "broken json": ("a.jsonl", '{"text": "x"}\n{"text": \n', "{path}:2: invalid JSON: .*one whole JSON object"),
    "not utf-8 json": ("a.jsonl", b'{"text": "x"}\n{"text": "\xff"}\n', "{path}:2: invalid JSON"),
    "no object": ("a.jsonl", "\n[1]\n", "{path}:2: a JSON list, where an object with a field 'text' must be"),
    "no field": (
        "a.jsonl",
        '{"body": 1, "id": 2}\n',
        "{path}:1: no field 'text'; it has 'body', 'id': set --data.text-field",
    ),
    "no string": ("a.jsonl", '{"text": 3}\n', "{path}:1: 'text' holds a int, not a string"),
    "no parquet": ("a.parquet", "text", "{path}: not a whole Parquet file"),
    "too short": ("a.txt", "abc", r"\({path}\) has 4 tokens, fewer than one sample of seq_len \+ 1 = 5: .*at most 3"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_bad_file_is_named_with_its_line(tmp_path, case):
    name, content, match = BAD_FILES[case]
    if name.endswith(".parquet"):
        pytest.importorskip("pyarrow")
    path = write(tmp_path / name, content)
    refused(match.replace("{path}", re.escape(path)), path=(path,), held_out=0.0, cache_dir=str(tmp_path / "cache"))


def test_paths_that_lead_nowhere_name_the_option(tmp_path):
    missing = str(tmp_path / "none.txt")
    refused(f"data.path: there is no file {re.escape(missing)}", path=(missing,))
    refused(r"data.path: no file matches '.*\*\.txt'", path=(str(tmp_path / "*.txt"),))
    refused("data.path: .* is a folder; name its files with a glob", path=(str(tmp_path),))
    text = write(tmp_path / "a.txt", "a text")
    refused("data.eval_path: there is no file", path=(text,), eval_path=(missing,))


def test_a_file_that_cannot_be_read(tmp_path, monkeypatch):
    path = write(tmp_path / "a.txt", "a text")

    # Permissions do not bind the user that tests in containers run as.
    def denied(self):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", denied)
    refused(f"cannot read {re.escape(path)}: Permission denied", path=(path,))


def test_a_glob_may_find_empty_files_but_not_only_those(tmp_path):
    write(tmp_path / "a.txt", "")
    refused("no text in .*a.txt: every document is empty", path=(str(tmp_path / "*.txt"),))
    write(tmp_path / "b.txt", "some text")
    assert len(build_data(DataConfig(path=(str(tmp_path / "*.txt"),), held_out=0.0), 4).train) == 2


def test_parquet_without_the_column_or_with_numbers(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    pyarrow = pytest.importorskip("pyarrow")
    path = str(tmp_path / "a.parquet")
    parquet.write_table(pyarrow.table({"body": ["x"], "n": [1]}), path)
    config = {"path": (path,), "cache_dir": str(tmp_path / "cache")}
    refused("a.parquet: no column 'text'; it has 'body', 'n': set --data.text-field", **config)
    refused("a.parquet, row 0: 'n' holds a int, not a string", text_field="n", **config)


@pytest.mark.parametrize("module, extra", [("pyarrow", "parquet"), ("tokenizers", "text")])
def test_a_missing_extra_is_named_with_the_command_that_installs_it(tmp_path, monkeypatch, module, extra):
    monkeypatch.setitem(sys.modules, module, None)
    path = write(tmp_path / "a.parquet", "text")
    tokenizer = "bytes" if module == "pyarrow" else write(tmp_path / "tokenizer.json", "{}")
    config = {"path": (path,), "tokenizer": tokenizer, "cache_dir": str(tmp_path / "cache")}
    refused(rf"needs? .*pip install 'functitan\[{extra}\]'", **config)


def test_no_standard_library_source(tmp_path, monkeypatch):
    monkeypatch.setattr(sources_module.sysconfig, "get_path", lambda name: str(tmp_path))
    refused("the standard library has no source files in .*--data.path FILE")


# Tokenizers and options -------------------------------------------------------------------------------------------


def test_bad_tokenizers(tmp_path):
    pytest.importorskip("tokenizers")
    refused("data.tokenizer: cannot read byte: No such file .*legal are 'bytes' and", tokenizer="byte")
    refused("data.tokenizer: cannot read .*tokenizer.json", tokenizer=str(tmp_path))
    broken = write(tmp_path / "tokenizer.json", '{"version": "1.0", "model"')
    refused("tokenizer.json is not a Hugging Face tokenizer.json: .*fetch or export it again", tokenizer=broken)
    refused("not a Hugging Face tokenizer.json", tokenizer=write(tmp_path / "other.json", b"\xff\x00"))


def test_a_broken_tokenizer_config_and_text_that_is_not_utf8(tmp_path):
    path = word_tokenizer(tmp_path)
    bad = write(tmp_path / "a.txt", b"caf\xe9 au lait")
    config = {"path": (bad,), "tokenizer": path, "cache_dir": str(tmp_path / "cache")}
    refused(r"a.txt is not UTF-8 \(byte 3\): convert it", **config)
    assert not list((tmp_path / "cache").iterdir())
    write(tmp_path / "tokenizer_config.json", "[]")
    refused("tokenizer_config.json cannot be read as a JSON object", **config)


def test_a_model_vocabulary_below_the_tokenizer_is_refused_before_any_text_is_read():
    refused("ids up to 256 and the model a vocabulary of 200", vocab_size=200, path=("missing.txt",))


def test_every_bad_option_is_said_at_once():
    config = DataConfig(format="csv", held_out=1.0, seed=-1, prefetch=-2)
    problems = config_problems(config)
    assert [problem.split(":")[0] for problem in problems] == [
        "data.format", "data.held_out", "data.seed", "data.prefetch",
    ]  # fmt: skip
    with pytest.raises(
        DataError, match="is 'csv', give auto, text, jsonl or parquet; .*0 to 2\\*\\*32 - 1; .*prefetch"
    ):
        build_data(config, 4)
    refused("seq_len is 0", seq_len=0)


def test_bad_batch_sizes_and_positions(tmp_path):
    data = build_data(DataConfig(path=(write(tmp_path / "a.txt", "text" * 9),)), 4)
    with pytest.raises(DataError, match="batch size is 0"):
        train_batches(data.train, 0)
    with pytest.raises(DataError, match="position is -1"):
        train_batches(data.train, 1, -1)


# The cache --------------------------------------------------------------------------------------------------------


def word_tokenizer(folder: Path) -> str:
    tokenizers = pytest.importorskip("tokenizers")
    words = {word: i for i, word in enumerate(["<unk>", "one", "two", "three", "</s>"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    return str(folder / "tokenizer.json")


@pytest.fixture
def words(tmp_path) -> DataConfig:
    path = write(tmp_path / "a.jsonl", "".join(f'{{"text": "{t}"}}\n' for t in ("one two", "three", "four one")))
    return DataConfig(path=(path,), tokenizer=word_tokenizer(tmp_path), held_out=0.0, cache_dir=str(tmp_path / "cache"))


WORDS = [1, 2, 4, 3, 4, 0, 1, 4]


def test_tokens_are_made_once_and_again_when_text_or_tokenizer_change(words, monkeypatch):
    data = build_data(words, 3)
    assert data.train.corpus.tokens.tolist() == WORDS and data.train.corpus.tokens.dtype == np.uint16
    assert data.train.corpus.ends.tolist() == [3, 5, 8]
    with monkeypatch.context() as patch:
        patch.setattr(corpus_module, "read_documents", None)  # calling it would be a TypeError
        again = build_data(words, 3)
        assert again.train.corpus.tokens.tolist() == WORDS and len(again.held_out) == 0
    with open(words.path[0], "a") as file:
        file.write('{"text": "two two"}\n')
    assert build_data(words, 3).train.corpus.tokens.tolist() == [*WORDS, 2, 2, 4]
    tokenizer = Path(words.tokenizer)
    tokenizer.write_text(tokenizer.read_text().replace("three", "four"))
    assert build_data(words, 3).train.corpus.tokens.tolist() == [1, 2, 4, 0, 4, 3, 1, 4, 2, 2, 4]
    assert len(list(Path(words.cache_dir).iterdir())) == 3


def test_large_byte_text_is_mapped_and_equal_to_the_one_in_memory(tmp_path, monkeypatch):
    path = write(tmp_path / "a.txt", bytes(range(256)) * 4)
    config = DataConfig(path=(path,), held_out=0.3, cache_dir=str(tmp_path / "cache"))
    small = build_data(config, 16)
    assert not Path(config.cache_dir).exists()
    monkeypatch.setattr(corpus_module, "_IN_MEMORY", 1000)
    large = build_data(config, 16)
    assert len(list(Path(config.cache_dir).iterdir())) == 1
    for a, b in ((small.train, large.train), (small.held_out, large.held_out)):
        assert a.corpus.tokens.tolist() == b.corpus.tokens.tolist() and a.corpus.ends.tolist() == b.corpus.ends.tolist()


def test_ranks_of_a_machine_tokenise_a_text_once(words, monkeypatch):
    builds, build = [], corpus_module._build_cache

    def slow(*args):
        builds.append(args)
        time.sleep(0.3)
        build(*args)

    monkeypatch.setattr(corpus_module, "_build_cache", slow)
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda _: build_data(words, 3).train.corpus.tokens.tolist(), range(3)))
    assert found == [WORDS] * 3 and len(builds) == 1
    assert len(list(Path(words.cache_dir).iterdir())) == 1, "the lock is gone"


def test_a_failed_build_leaves_nothing_behind(words, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(corpus_module, "_write_documents", full)
        with pytest.raises(DataError, match="cannot write the token cache .*No space left.*--data.cache-dir"):
            build_data(words, 3)
    assert list(Path(words.cache_dir).iterdir()) == []
    assert build_data(words, 3).train.corpus.tokens.tolist() == WORDS


def test_a_cache_folder_that_cannot_be_made(words, tmp_path):
    file = write(tmp_path / "file", "x")
    with pytest.raises(DataError, match="cannot write the token cache .*--data.cache-dir"):
        build_data(DataConfig(path=words.path, tokenizer=words.tokenizer, cache_dir=file), 3)


def test_a_damaged_cache_is_named_with_the_remedy(words):
    build_data(words, 3)
    (folder,) = Path(words.cache_dir).iterdir()
    os.truncate(folder / "train.tokens", 4)
    with pytest.raises(DataError, match=f"{folder.name} is damaged .*has 4 bytes and not 16.*remove that folder"):
        build_data(words, 3)
    (folder / "sizes.json").write_text(json.dumps({}))
    with pytest.raises(DataError, match="is damaged"):
        build_data(words, 3)


def test_processes_that_build_the_same_cache_at_once_all_get_it(words, monkeypatch):
    together = threading.Barrier(4, timeout=30)
    original = corpus_module._write_documents

    def write_together(*args):
        original(*args)
        together.wait()  # all have written and none has renamed

    monkeypatch.setattr(corpus_module, "_write_documents", write_together)
    # As on machines that share the folder, and not the lock.
    monkeypatch.setattr(corpus_module, "_only_one", lambda path: contextlib.nullcontext())
    results = []
    threads = [
        threading.Thread(target=lambda: results.append(build_data(words, 3).train.corpus.tokens.tolist()))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [WORDS] * 4
    assert len(list(Path(words.cache_dir).iterdir())) == 1


def test_the_cache_is_under_the_users_cache_folder(words, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    build_data(DataConfig(path=words.path, tokenizer=words.tokenizer, held_out=0.0), 3)
    assert len(list((tmp_path / "xdg" / "functitan").iterdir())) == 1
    assert load_tokenizer(words.tokenizer).decode([1, 2, 4]) == "one two </s>"
