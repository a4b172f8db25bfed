"""Files to documents, tokens, samples and batches; the order of samples (cases D1, D2, D3, and K1's next batch)."""

import json
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from train.data import (
    IGNORED,
    ByteTokenizer,
    DataConfig,
    DataError,
    Dataset,
    Loader,
    build_data,
    check_vocab,
    corpus_of,
    eval_batches,
    load_tokenizer,
    train_batches,
)
from train.data.loader import sample_order

EOD = 256


def dataset(n: int, seq_len: int = 4, **config) -> Dataset:
    """`n` samples of one document; sample i starts with the token i * seq_len."""
    return Dataset(corpus_of([range(n * seq_len)], EOD), seq_len, EOD, DataConfig(**config))


def samples(batch: dict, seq_len: int = 4) -> list[int]:
    return (batch["tokens"][:, 0] // seq_len).tolist()


def take(loader: Loader, n: int) -> list[int]:
    read = [i for _ in range(n) for i in samples(next(loader))]
    loader.close()
    return read


def write(path: Path, text: str | bytes) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


# Order ------------------------------------------------------------------------------------------------------------


def test_d1_stopped_after_7_of_5_samples_goes_on_with_the_third_of_the_second_epoch():
    loader = train_batches(dataset(5), 1)
    read = [samples(next(loader))[0] for _ in range(7)]
    position = loader.position
    rest = [samples(next(loader))[0] for _ in range(8)]
    loader.close()
    assert position == 7 and divmod(position, 5) == (1, 2)
    order = sample_order(5, True, 0)
    assert read + rest == [order(i) for i in range(15)]
    assert take(train_batches(dataset(5), 1, position), 8) == rest


@pytest.mark.parametrize("n", [5, 64, 1000])
def test_d2_each_epoch_is_a_new_permutation_and_the_same_for_the_same_seed(n):
    order = sample_order(n, True, 3)
    epochs = [[order(e * n + i) for i in range(n)] for e in range(4)]
    assert all(sorted(epoch) == list(range(n)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    again = sample_order(n, True, 3)
    assert [again(i) for i in range(4 * n)] == [i for epoch in epochs for i in epoch]
    assert [sample_order(n, True, 4)(i) for i in range(n)] not in epochs


def test_the_order_of_a_seed_never_changes():
    # A checkpoint holds a position in this order: another order would train on some samples twice and on others never.
    order = sample_order(10, True, 0)
    assert [order(i) for i in range(20)] == [5, 8, 9, 7, 4, 2, 1, 0, 3, 6, 6, 9, 4, 8, 0, 7, 3, 2, 1, 5]


def test_seeds_do_not_share_epochs():
    epochs = [tuple(sample_order(50, True, seed)(e * 50 + i) for i in range(50)) for seed in range(4) for e in range(4)]
    assert len(set(epochs)) == 16


def test_without_shuffle_the_order_is_that_of_the_text_in_every_epoch():
    assert take(train_batches(dataset(5, shuffle=False), 3), 4) == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]


@pytest.mark.parametrize("ranks", [1, 2, 3, 6])
def test_k1_the_global_batch_does_not_depend_on_the_number_of_ranks(ranks):
    whole = next(train_batches(dataset(11), 6, position=7))
    size = 6 // ranks
    parts = [next(train_batches(dataset(11), 6, 7, rows=range(r * size, (r + 1) * size))) for r in range(ranks)]
    for name, value in whole.items():
        assert torch.equal(torch.cat([part[name] for part in parts]), value)


def test_prefetching_changes_nothing_but_the_time():
    direct, ahead = (train_batches(dataset(7, prefetch=p), 2, position=3) for p in (0, 5))
    assert [samples(next(direct)) for _ in range(20)] == [samples(next(ahead)) for _ in range(20)]
    assert direct.position == ahead.position == 43
    ahead.close()


def test_a_fingerprint_tells_texts_apart_and_not_how_they_are_kept():
    documents = [range(100, 130), range(50)]
    one = corpus_of(documents, EOD)
    assert one.fingerprint() == attrs.evolve(one, tokens=one.tokens.astype("uint16")).fingerprint()
    others = [documents[::-1], [range(100, 130), range(51)], [[*range(100, 129), 7], range(50)], [range(100, 131)]]
    assert len({one.fingerprint(), *(corpus_of(other, EOD).fingerprint() for other in others)}) == 5
    # As many tokens, of which the documents end elsewhere.
    assert one.fingerprint() != attrs.evolve(one, ends=one.ends - [1, 0]).fingerprint()


# Validation -------------------------------------------------------------------------------------------------------


def test_d3_validation_counts_every_sample_once_and_every_rank_has_the_same_number_of_batches():
    data = dataset(5)
    batches = list(eval_batches(data, 2))
    assert len(batches) == 3
    assert all(batch["labels"].shape == (2, 4) for batch in batches)
    labels = torch.cat([batch["labels"].flatten() for batch in batches])
    assert labels[labels != IGNORED].tolist() == list(range(1, 20)) + [EOD]
    ranks = [list(eval_batches(data, 2, rows=range(r, r + 1))) for r in range(2)]
    assert [len(batches) for batches in ranks] == [3, 3]
    for batch, *parts in zip(batches, *ranks):
        assert all(torch.equal(torch.cat([part[name] for part in parts]), batch[name]) for name in batch)


def test_a_limit_of_validation_batches_reads_samples_from_everywhere_once():
    read = [i for batch in eval_batches(dataset(100), 2, limit=5) for i in samples(batch)]
    assert read == list(range(0, 100, 10))
    assert len(list(eval_batches(dataset(5), 2, limit=100))) == 3
    with pytest.raises(DataError, match="limit of validation batches is 0"):
        eval_batches(dataset(5), 2, limit=0)


def test_nothing_to_validate_on_is_no_batch():
    empty = Dataset(corpus_of([], EOD), 4, EOD, partial=True)
    assert len(empty) == 0 and list(eval_batches(empty, 2)) == []


# Packing ----------------------------------------------------------------------------------------------------------


def test_packed_documents_of_3_5_and_8_tokens():
    corpus = corpus_of([[1, 2], [3, 4, 5, 6], [7, 8, 9, 10, 11, 12, 13]], EOD)
    sample = Dataset(corpus, 16, EOD, partial=True)[0]
    X = IGNORED
    assert sample["tokens"].tolist() == [1, 2, EOD, 3, 4, 5, 6, EOD, 7, 8, 9, 10, 11, 12, 13, EOD]
    assert sample["labels"].tolist() == [2, EOD, X, 4, 5, 6, EOD, X, 8, 9, 10, 11, 12, 13, EOD, X]
    assert sample["positions"].tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6, 7]
    assert sample["documents"].tolist() == [0] * 3 + [1] * 5 + [2] * 8


def test_without_documents_a_sample_is_one_stretch_of_text():
    corpus = corpus_of([[1, 2], [3, 4], [5]], EOD)
    sample = Dataset(corpus, 5, EOD, DataConfig(documents=False))[0]
    assert sample["labels"].tolist() == [2, EOD, 3, 4, EOD]
    assert sample["positions"].tolist() == [0, 1, 2, 3, 4] and sample["documents"].tolist() == [0] * 5


DOCUMENTS = st.lists(st.lists(st.integers(0, 255), max_size=12), min_size=1, max_size=8)


@given(documents=DOCUMENTS, seq_len=st.integers(1, 9))
def test_every_successor_within_a_document_is_a_label_once(documents, seq_len):
    data = Dataset(corpus_of(documents, EOD), seq_len, EOD, partial=True)
    pairs = Counter()
    for batch in eval_batches(attrs.evolve(data, config=DataConfig(prefetch=0)), 3):
        assert all(value.dtype == torch.int64 and value.shape == (3, seq_len) for value in batch.values())
        assert int(batch["positions"].max()) < seq_len and int(batch["documents"][:, 0].max()) == 0
        # A position and a document go up by one within a document; a new document starts at 0.
        step = batch["documents"].diff(dim=1)
        assert torch.equal(batch["positions"][:, 1:], torch.where(step == 1, 0, batch["positions"][:, :-1] + 1))
        kept = batch["labels"] != IGNORED
        pairs.update(zip(batch["tokens"][kept].tolist(), batch["labels"][kept].tolist()))
    assert pairs == Counter(pair for d in documents for pair in zip([*d, EOD], [*d, EOD][1:]))


@given(documents=DOCUMENTS, seq_len=st.integers(1, 9), index=st.integers(0, 20))
def test_a_sample_is_a_slice_of_the_stream(documents, seq_len, index):
    data = Dataset(corpus_of(documents, EOD), seq_len, EOD)
    stream = [token for document in documents for token in [*document, EOD]]
    assert len(data) == (len(stream) - 1) // seq_len
    if index < len(data):
        part = stream[index * seq_len : (index + 1) * seq_len + 1]
        assert data[index]["tokens"].tolist() == part[:-1]
        assert all(label in (IGNORED, true) for label, true in zip(data[index]["labels"].tolist(), part[1:]))
    else:
        with pytest.raises(IndexError, match=f"sample {index} of"):
            data[index]


# The loader -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefetch", [0, 3])
def test_an_error_in_the_background_reaches_the_reader_in_its_place_and_ends_the_loader(prefetch):
    def read(index):
        if index == 2:
            raise DataError("corpus.txt: the disk is gone")
        return {"tokens": torch.tensor([index])}

    loader = Loader(read, 10, prefetch, position=0, stride=4)
    assert [int(next(loader)["tokens"]) for _ in range(2)] == [0, 1]
    with pytest.raises(DataError, match="corpus.txt: the disk is gone"):
        next(loader)
    assert loader.position == 8
    with pytest.raises(RuntimeError, match="closed"):
        next(loader)


def test_the_wait_for_data_is_measured_and_a_prefetched_batch_costs_none():
    def read(index):
        time.sleep(0.2)
        return {"tokens": torch.tensor([index])}

    direct = Loader(read, 10, prefetch=0)
    next(direct)
    assert direct.wait_s >= 0.2
    ahead = Loader(read, 10, prefetch=1)
    time.sleep(1.0)
    next(ahead)
    assert ahead.wait_s < 0.2
    ahead.close()


def test_close_ends_the_thread():
    loader = train_batches(dataset(5), 2)
    next(loader)
    loader.close()
    loader.close()
    deadline = time.monotonic() + 10
    while any("grain" in thread.name for thread in threading.enumerate()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not [thread.name for thread in threading.enumerate() if "grain" in thread.name]


def test_loading_prints_nothing_and_grain_is_imported_only_when_used():
    program = """
import sys
from train.data import DataConfig, Dataset, corpus_of, train_batches
assert "grain" not in sys.modules
loader = train_batches(Dataset(corpus_of([range(21)], 256), 4, 256, DataConfig(prefetch=2)), 3)
[next(loader) for _ in range(9)]
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("rows", [range(0), range(2, 5), range(-1, 2)])
def test_rows_outside_the_batch_are_refused(rows):
    with pytest.raises(ValueError, match="no rows of a batch of 4"):
        train_batches(dataset(5), 4, rows=rows)


# Tokenizers -------------------------------------------------------------------------------------------------------


@given(st.text())
def test_bytes_round_trip(text):
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text.encode(errors="replace").decode()


def test_bytes_decode_whatever_a_model_says():
    assert ByteTokenizer().decode([0xC3, 65, 256, 0xFF, 66, 300, -1]) == "\ufffdA\ufffdB"


def make_tokenizer(folder: Path, special: tuple[str, ...] = ()) -> str:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=list(special),
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the cat sat on the mat, the hat on the cat"] * 3, trainer)
    # As in the files of many published models: cut and fill to the length that the model had.
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=4)
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return str(folder / "tokenizer.json")


def test_a_tokenizer_json_keeps_the_whole_text_whatever_truncation_it_was_saved_with(tmp_path):
    tokenizer = load_tokenizer(make_tokenizer(tmp_path))
    text = "the cat sat on the mät\n"
    ids = tokenizer.encode(text)
    assert 4 < len(ids) < len(text.encode())
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([*ids, tokenizer.eod, 10**6]) == text
    assert load_tokenizer(str(tmp_path)).fingerprint == tokenizer.fingerprint


def test_the_end_of_document_is_the_named_one_the_usual_one_or_a_new_id(tmp_path):
    bare = load_tokenizer(make_tokenizer(tmp_path / "a"))
    assert bare.eod == bare.vocab_size - 1 == bare.inner.get_vocab_size()
    usual = load_tokenizer(make_tokenizer(tmp_path / "b", ("<unk>", "<|endoftext|>", "<stop>")))
    assert (usual.eod, usual.vocab_size) == (1, usual.inner.get_vocab_size())
    for eos in ("<stop>", {"content": "<stop>", "lstrip": False}):
        write(tmp_path / "b" / "tokenizer_config.json", json.dumps({"eos_token": eos}))
        assert load_tokenizer(str(tmp_path / "b")).eod == 2


def test_a_long_text_is_encoded_in_pieces_without_loss(tmp_path, monkeypatch):
    tokenizer = load_tokenizer(make_tokenizer(tmp_path))
    text = "the cat\nsat on\n\nthe mat" * 20
    whole = tokenizer.encode(text)
    monkeypatch.setattr("train.data.tokenizer._PIECE", 10)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert abs(len(tokenizer.encode(text)) - len(whole)) <= 20


def test_a_vocabulary_too_small_for_the_tokenizer_is_refused():
    check_vocab(ByteTokenizer(), 257)
    with pytest.raises(DataError, match="ids up to 256 and the model a vocabulary of 256: set .* to 257 or more"):
        check_vocab(ByteTokenizer(), 256)


# From files -------------------------------------------------------------------------------------------------------


def texts(data: Dataset) -> list[str]:
    starts = [0, *data.corpus.ends[:-1]]
    parts = [data.corpus.tokens[start:end] for start, end in zip(starts, data.corpus.ends)]
    return [ByteTokenizer().decode(part) for part in parts]


def test_text_jsonl_and_parquet_by_path_and_glob(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    pyarrow = pytest.importorskip("pyarrow")
    write(tmp_path / "deep" / "b.txt", "b text")
    write(tmp_path / "deep" / "er" / "a.md", "a text")
    write(tmp_path / "deep" / "er" / "empty.md", "")
    lines = write(tmp_path / "c[1].jsonl", '{"text": "c0"}\n\n{"text": "c1", "id": 3}\n{"text": ""}\n{"text": null}\n')
    parquet.write_table(pyarrow.table({"text": ["d0", None, "d1"]}), tmp_path / "d.parquet")
    paths = (str(tmp_path / "deep/**/*"), lines, lines, str(tmp_path / "d.parquet"))
    config = DataConfig(path=paths, held_out=0.0, cache_dir=str(tmp_path / "cache"))
    assert texts(build_data(config, 4).train) == ["b text", "a text", "c0", "c1", "d0", "d1"]


def test_the_split_depends_on_names_below_the_glob_only(tmp_path):
    def sides(root, order):
        for i in order:
            write(tmp_path / root / f"{i % 7}" / f"{i}.txt", f"text {i}")
        data = build_data(DataConfig(path=(str(tmp_path / root / "**/*.txt"),), held_out=0.2), 4)
        return texts(data.train), texts(data.held_out)

    train, held_out = sides("here", range(200))
    assert sides("there/and/elsewhere", reversed(range(200))) == (train, held_out)
    assert sorted(train + held_out) == sorted(f"text {i}" for i in range(200))
    assert 20 <= len(held_out) <= 60
    more_train, more_held_out = sides("here", range(200, 300))
    assert set(train) < set(more_train) and set(held_out) < set(more_held_out)


@pytest.mark.parametrize("name", [f"{i}.txt" for i in range(12)])
def test_of_one_document_the_end_is_held_out(tmp_path, name):
    path = write(tmp_path / name, "0123456789" * 10)
    data = build_data(DataConfig(path=(path,), held_out=0.25), 8)
    assert len(data.train.corpus.tokens) == 76 and len(data.held_out.corpus.tokens) == 25
    assert texts(data.train)[0] + texts(data.held_out)[0] == "0123456789" * 10


def test_other_files_to_validate_on(tmp_path):
    train, other = write(tmp_path / "a.txt", "train text"), write(tmp_path / "b.txt", "other")
    data = build_data(DataConfig(path=(train,), eval_path=(other,), held_out=0.5), 4)
    assert texts(data.train) == ["train text"] and texts(data.held_out) == ["other"]
    assert data.summary() == (
        "train: 11 tokens in 1 documents, 2 samples of 4; held out: 6 tokens in 1 documents, 2 samples of 4"
    )


def test_the_default_corpus_is_the_standard_library_of_this_python():
    data = build_data(DataConfig(), 256, 257)
    share = len(data.held_out.corpus.tokens) / (len(data.train.corpus.tokens) + len(data.held_out.corpus.tokens))
    assert 0.01 < share < 0.15 and len(data.train) > 10_000
    assert any("class OrderedDict" in text for text in texts(data.train) + texts(data.held_out))
    assert not set(texts(data.train)) & {text for text in texts(data.held_out) if len(text) > 200}
