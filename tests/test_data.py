"""Reading, checking and splitting: files as people have them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ranksearch.data import check_data, load
from ranksearch.data.dataset import Gathered, gather
from ranksearch.errors import DataError
from ranksearch.spec import DataSpec

LABELS = ("loan", "room")


def rows(n: int, start: int = 0) -> list[tuple[str, str]]:
    return [(f"text number {k} of {LABELS[k % 2]}", LABELS[k % 2]) for k in range(start, start + n)]


def csv_text(pairs: list[tuple[str, str]], header: str = "text,label") -> str:
    return "\n".join([header, *(f"{text},{label}" for text, label in pairs)]) + "\n"


def write(folder: Path, name: str, content: str | bytes) -> None:
    (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)


def look(folder: Path, train: str = "train.csv", **keys: Any) -> Gathered:
    return gather(DataSpec.model_validate({"train": train} | keys), "classification", folder)


def told(found: Gathered) -> str:
    return "\n".join([*map(str, found.faults), *found.notes])


def texts(found: Gathered, part: str | None = None) -> list[str]:
    assert found.dataset is not None, told(found)
    parts = [part] if part else ["train", "eval", "test"]
    return [text for p in parts for text in found.dataset.parts[p].cells["text"]]


# Table files


def test_a_spreadsheets_csv_gives_exactly_its_records(tmp_path: Path) -> None:
    body = '\ufefftext,label\r\n"a, comma",loan\r\n"two\nlines",room\r\n"""quoted"" word",loan\r\n'
    body += '"crlf\r\ninside",room\r\n'
    body += "".join(f"{text},{label}\r\n" for text, label in rows(20)) + "last one,room"
    write(tmp_path, "train.csv", body)
    found = look(tmp_path)
    assert sorted(texts(found)) == sorted(
        ["a, comma", "two\nlines", '"quoted" word', "crlf\r\ninside", "last one", *(t for t, _ in rows(20))]
    )
    assert found.dataset is not None and found.dataset.facts["sources"]["train"]["read"] == 25
    assert "\ufeff" not in told(found)


def test_lines_are_those_of_an_editor_where_cells_span_several(tmp_path: Path) -> None:
    write(
        tmp_path,
        "train.csv",
        'text,label\r\n"one\ntwo\nthree",loan\r\n\r\n,room\r\n"x\ny",\r\n' + csv_text(rows(8), "z,loan"),
    )
    found = look(tmp_path)
    assert "train.csv, line 6" in told(found) and "an empty `text`" in told(found)
    assert "train.csv, line 7" in told(found) and "an empty `label`" in told(found)


@pytest.mark.parametrize("delimiter", [",", "\t", ";", "|"])
def test_the_delimiter_is_found_and_told(tmp_path: Path, delimiter: str) -> None:
    pairs = [(f"a, b; c | d {k}".replace(delimiter, " "), label) for k, (_, label) in enumerate(rows(12))]
    write(tmp_path, "train.csv", "\n".join(f"{t}{delimiter}{y}" for t, y in [("text", "label"), *pairs]))
    found = look(tmp_path)
    assert sorted(texts(found)) == sorted(t for t, _ in pairs)
    assert "delimiter" in told(found)


def test_a_delimiter_that_the_spec_gives_is_used(tmp_path: Path) -> None:
    write(tmp_path, "train.csv", "text#label\n" + "\n".join(f"{t}#{y}" for t, y in rows(12)))
    assert len(texts(look(tmp_path, delimiter="#"))) == 12


def test_excels_separator_line_is_no_record(tmp_path: Path) -> None:
    write(tmp_path, "train.csv", "sep=;\r\ntext;label\r\n;loan\r\n" + "".join(f"{t};{y}\r\n" for t, y in rows(12)))
    assert "train.csv, line 3" in told(look(tmp_path))


def test_a_tsv_without_quoting_keeps_its_quotes(tmp_path: Path) -> None:
    pairs = [(f'"said {k}' if k % 3 else f'he "said" {k}', label) for k, (_, label) in enumerate(rows(12))]
    write(tmp_path, "train.tsv", "\n".join(f"{t}\t{y}" for t, y in [("text", "label"), *pairs]))
    found = look(tmp_path, "train.tsv")
    assert sorted(texts(found)) == sorted(t for t, _ in pairs)
    assert "no quoting" in told(found)


def test_one_stray_quote_does_not_turn_quoting_off_for_all(tmp_path: Path) -> None:
    body = "".join(f'"{t}","{y}"\n' for t, y in rows(12)) + '"he said "hi" there","loan"\n'
    write(tmp_path, "train.csv", '"text","label"\n' + body)
    found = look(tmp_path, bad_rows="drop")
    assert sorted(texts(found)) == sorted(t for t, _ in rows(12))
    assert "train.csv, line 14" in told(found)


def test_backslashes_before_quotes_are_understood(tmp_path: Path) -> None:
    write(tmp_path, "train.csv", 'text,label\n"he said \\"hi, you\\"",loan\n' + csv_text(rows(12), "more,room"))
    assert 'he said "hi, you"' in texts(look(tmp_path))


def test_rows_with_too_many_or_too_few_cells_are_named(tmp_path: Path) -> None:
    write(tmp_path, "train.csv", csv_text(rows(6)) + "a,b,loan\nshort\n" + csv_text(rows(6, 6), "x,room") + "torn")
    found = look(tmp_path)
    assert [fault.place for fault in found.faults] == ["train.csv, line 8", "train.csv, lines 9 and 17"]
    kept = look(tmp_path, bad_rows="drop")
    assert len(texts(kept)) == 13 and "lines 9 and 17" in told(kept)
    assert kept.dataset is not None and sum(x["count"] for x in kept.dataset.facts["sources"]["train"]["left_out"]) == 3


def test_a_quote_that_swallows_the_rest_of_the_file_is_a_fault_even_where_rows_are_dropped(tmp_path: Path) -> None:
    body = csv_text([*rows(6), ('"a, quoted cell"', "loan")])
    write(tmp_path, "train.csv", body + '"never closed,loan\n' + csv_text(rows(6, 6), "x,room"))
    found = look(tmp_path, bad_rows="drop")
    assert [fault.place for fault in found.faults] == ["train.csv, line 9"]


def test_a_record_torn_inside_quotes_at_the_end_is_one_bad_row(tmp_path: Path) -> None:
    write(tmp_path, "train.csv", csv_text(rows(12)) + '"cut off in the mid')
    assert len(texts(look(tmp_path, bad_rows="drop"))) == 12
    assert "train.csv, line 14" in told(look(tmp_path))


def test_very_long_cells_are_read(tmp_path: Path) -> None:
    write(tmp_path, "train.csv", csv_text([("x" * 300_000, "loan"), *rows(12)]))
    assert "x" * 300_000 in texts(look(tmp_path))


def test_a_nul_character_is_told_with_its_line(tmp_path: Path) -> None:
    write(tmp_path, "train.csv", csv_text([*rows(6), ("nul \0 here", "loan")]))
    assert "train.csv, line 8" in told(look(tmp_path)) and "NUL" in told(look(tmp_path))


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("train.csv", "", "empty file"),
        ("train.csv", "\ufeff", "empty file"),
        ("train.csv", "\n\n", "empty file"),
        ("train.csv", "text,label\n", "header only"),
        ("train.jsonl", "", "empty file"),
        ("train.json", "[]", "empty list"),
        ("train.csv", b"PK\x03\x04rest", "Excel"),
        ("train.csv", b"\x1f\x8b\x08rest", "gzip"),
        ("train.parquet", b"PAR1 not really", "Parquet"),
        ("train.xlsx", b"PK\x03\x04rest", ".csv"),
        ("train.json", '{"a": 1', "list of objects"),
        ("train.csv", "text,text,label\na,b,c\n", "`text` 2 times"),
        ("train.csv", "text\na\nb\n", "one column only"),
    ],
)
def test_a_file_that_can_not_be_used_is_told_in_one_fault(tmp_path: Path, name: str, content: Any, words: str) -> None:
    write(tmp_path, name, content)
    found = look(tmp_path, name)
    assert len(found.faults) == 1 and words in str(found.faults[0]) and name in str(found.faults[0])


def test_a_missing_file_names_the_nearest_and_a_folder_is_told(tmp_path: Path) -> None:
    write(tmp_path, "train.csv", csv_text(rows(12)))
    (tmp_path / "parts").mkdir()
    (tmp_path / "lost.csv").symlink_to(tmp_path / "nowhere.csv")
    assert "train.csv" in str(look(tmp_path, "trian.csv").faults[0])
    assert "a folder" in str(look(tmp_path, "parts").faults[0])
    assert "must exist" in str(look(tmp_path, "lost.csv").faults[0])
    assert "must match" in str(look(tmp_path, "parts/*.csv").faults[0])


def test_a_missing_column_names_those_that_exist_and_the_nearest(tmp_path: Path) -> None:
    write(tmp_path, "train.csv", csv_text(rows(12), "Text,category"))
    found = look(tmp_path)
    assert len(found.faults) == 2
    assert "`Text`?" in found.faults[0].remedy and "`category`" in found.faults[1].got
    assert "data.label" in found.faults[1].place


def test_blanks_around_column_names_and_labels_are_taken_off_and_told(tmp_path: Path) -> None:
    write(tmp_path, "train.csv", csv_text([(t, f" {y}") for t, y in rows(12)], "text, label"))
    found = look(tmp_path)
    assert found.dataset is not None and found.dataset.labels == LABELS
    assert "column names" in told(found) and "12 labels" in told(found)


def test_a_pattern_reads_its_files_in_order_and_names_each(tmp_path: Path) -> None:
    write(tmp_path, "b.csv", csv_text([*rows(6), ("", "loan")]))
    write(tmp_path, "a.jsonl", "\n".join(json.dumps({"text": t, "label": y}) for t, y in rows(6, 6)))
    found = look(tmp_path, "[ab].*", bad_rows="drop")
    assert len(texts(found)) == 12
    assert "b.csv, line 8" in told(found)
    assert [f["name"] for f in found.dataset.facts["sources"]["train"]["files"]] == ["a.jsonl", "b.csv"]  # type: ignore[union-attr]


# Encodings


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-32", "cp1252"])
def test_the_encoding_is_found_and_told(tmp_path: Path, encoding: str) -> None:
    pairs = [(f"café crème à la “carte” {k}", label) for k, (_, label) in enumerate(rows(12))]
    write(tmp_path, "train.csv", csv_text(pairs).encode(encoding))
    found = look(tmp_path)
    assert sorted(texts(found)) == sorted(t for t, _ in pairs)
    assert found.dataset is not None
    assert found.dataset.facts["sources"]["train"]["files"][0]["encoding"] == encoding
    if encoding == "cp1252":
        assert "line 2" in told(found) and "data.encoding" in told(found)


def test_an_encoding_that_can_not_be_found_out_is_asked_for(tmp_path: Path) -> None:
    pairs = [(f"продлите книгу номер {k}", label) for k, (_, label) in enumerate(rows(12))]
    write(tmp_path, "train.csv", csv_text(pairs).encode("cp1251"))
    assert "cp1251" in str(look(tmp_path).faults[0]) and "line 2" in str(look(tmp_path).faults[0])
    assert sorted(texts(look(tmp_path, encoding="cp1251"))) == sorted(t for t, _ in pairs)
    assert "data.encoding" in str(look(tmp_path, encoding="klingon").faults[0])
    assert "line 2" in str(look(tmp_path, encoding="ascii").faults[0])


def test_broken_bytes_in_utf8_cost_only_their_rows(tmp_path: Path) -> None:
    body = csv_text([*((f"naïve café {k}", LABELS[k % 2]) for k in range(12)), ("bad", "loan")]).encode()
    write(tmp_path, "train.csv", body.replace(b"bad", b"b\xe9d"))
    found = look(tmp_path, bad_rows="drop")
    assert len(texts(found)) == 12 and "train.csv, line 14" in told(found)
    assert "naïve café 3" in texts(found)


# Words and numbers as they stand


def test_words_for_missing_values_are_ordinary_texts_and_labels(tmp_path: Path) -> None:
    words = ["NA", "N/A", "null", "NULL", "None", "nan", "<NA>", "n/a", "-", "0"]
    pairs = [(w, "None") for w in words] + [(t, "space") for t, _ in rows(10)]
    write(tmp_path, "train.csv", csv_text(pairs))
    write(tmp_path, "train.jsonl", "\n".join(json.dumps({"text": t, "label": y}) for t, y in pairs))
    for name in ("train.csv", "train.jsonl"):
        found = look(tmp_path, name)
        assert sorted(texts(found)) == sorted(t for t, _ in pairs)
        assert found.dataset is not None and found.dataset.labels == ("None", "space")


def test_empty_labels_are_refused_with_their_lines_or_dropped_and_counted(tmp_path: Path) -> None:
    pairs = [(t, "" if k in (3, 7) else str(k % 2)) for k, (t, _) in enumerate(rows(20))]
    write(tmp_path, "train.csv", csv_text(pairs))
    found = look(tmp_path)
    assert len(found.faults) == 1 and found.faults[0].place == "train.csv, lines 5 and 9"
    kept = look(tmp_path, bad_rows="drop")
    assert kept.dataset is not None and kept.dataset.labels == ("0", "1")
    assert kept.dataset.facts["sources"]["train"]["kept"] == 18 and "lines 5 and 9" in told(kept)


def test_many_bad_rows_are_told_by_the_first_ten_and_the_count(tmp_path: Path) -> None:
    write(tmp_path, "train.csv", csv_text([*rows(12), *((f"t {k}", " ") for k in range(200))]))
    fault = look(tmp_path).faults[0]
    assert "200 of 212 rows" in fault.got and fault.place.endswith("22, 23 and 190 more")


def test_json_numbers_keep_their_digits_as_labels(tmp_path: Path) -> None:
    big = ("123456789012345678", "123456789012345679")
    lines = [f'{{"text": "row {k}", "label": {big[k % 2]}}}' for k in range(12)]
    write(tmp_path, "train.jsonl", "\n".join([*lines, '{"text": "null label", "label": null}']))
    found = look(tmp_path, "train.jsonl", bad_rows="drop")
    assert found.dataset is not None and found.dataset.labels == big
    assert "train.jsonl, line 13" in told(found)


def test_true_1_and_1_0_are_three_labels_and_the_likeness_is_told(tmp_path: Path) -> None:
    values = ("1", "1.0", "true")
    write(tmp_path, "train.jsonl", "\n".join(f'{{"text": "row {k}", "label": {values[k % 3]}}}' for k in range(18)))
    found = look(tmp_path, "train.jsonl")
    assert found.dataset is not None and found.dataset.labels == values
    assert "`1` and `1.0` look alike" in told(found)


def test_lines_that_are_no_json_objects_are_named(tmp_path: Path) -> None:
    good = [json.dumps({"text": f"{t}\u2028x", "label": y}, ensure_ascii=False) for t, y in rows(12)]
    bad = ['["a"]', '{"text": "x", "label": NaN}', '{"text": "x", "text": "y", "label": "loan"}', '{"text": "torn']
    write(tmp_path, "train.jsonl", "\r\n".join([*good, "", *bad]))
    found = look(tmp_path, "train.jsonl")
    assert {f.place for f in found.faults} == {"train.jsonl, line 14", "train.jsonl, lines 15, 16 and 17"}
    assert len(texts(look(tmp_path, "train.jsonl", bad_rows="drop"))) == 12


def test_a_list_as_text_is_told_and_never_turned_into_text(tmp_path: Path) -> None:
    lines = [json.dumps({"text": t, "label": y}) for t, y in rows(12)] + ['{"text": ["a"], "label": "loan"}']
    write(tmp_path, "train.jsonl", "\n".join(lines))
    assert "train.jsonl, line 13" in told(look(tmp_path, "train.jsonl"))


def test_a_json_list_gives_the_line_of_each_item(tmp_path: Path) -> None:
    items = [{"text": t, "label": y} for t, y in rows(12)]
    items[4]["label"] = ""
    write(tmp_path, "train.json", json.dumps(items, indent=2))
    assert "train.json, line 18" in told(look(tmp_path, "train.json"))
    write(tmp_path, "torn.json", json.dumps(items, indent=2)[:-40])
    assert "torn.json, line" in str(look(tmp_path, "torn.json").faults[0])


def test_a_json_file_with_one_object_a_line_is_read_so(tmp_path: Path) -> None:
    write(tmp_path, "train.json", "\n".join(json.dumps({"text": t, "label": y}) for t, y in rows(12)))
    assert len(texts(look(tmp_path, "train.json"))) == 12


def test_parquet_labels_read_like_those_of_a_text_file(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    columns = {"text": [t for t, _ in rows(13)], "label": [None if k == 4 else float(k % 2) for k in range(13)]}
    pq.write_table(pa.table(columns), tmp_path / "train.parquet")
    write(tmp_path, "test.csv", csv_text([(f"other {k}", str(k % 2)) for k in range(4)]))
    found = look(tmp_path, "train.parquet", test="test.csv", bad_rows="drop")
    assert found.dataset is not None and found.dataset.labels == ("0", "1")
    assert "train.parquet, row 5" in told(found) and "decimals" in told(found)


def test_parquet_keeps_big_integers_and_booleans(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    big = [123456789012345678 + k % 2 for k in range(12)]
    pq.write_table(pa.table({"text": [t for t, _ in rows(12)], "label": big}), tmp_path / "a.parquet")
    pq.write_table(
        pa.table({"text": [t for t, _ in rows(12)], "label": [k % 2 == 0 for k in range(12)]}), tmp_path / "b.parquet"
    )
    assert look(tmp_path, "a.parquet").dataset.labels == ("123456789012345678", "123456789012345679")  # type: ignore[union-attr]
    assert look(tmp_path, "b.parquet").dataset.labels == ("false", "true")  # type: ignore[union-attr]


def test_a_hub_set_out_of_reach_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")

    def unreachable(*_: object, **__: object) -> None:
        raise ConnectionError("Couldn't reach the hub")

    monkeypatch.setattr(datasets, "get_dataset_split_names", unreachable)
    found = look(tmp_path, "hub:someone/some-set")
    assert "Couldn't reach" in told(found) and "offline" in told(found)


def test_a_hub_set_is_read_by_class_names_and_its_missing_labels_are_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")
    feature = datasets.ClassLabel(names=["ham", "spam"])
    features = datasets.Features({"text": datasets.Value("string"), "label": feature})
    held = {"text": [t for t, _ in rows(13)], "label": [-1 if k == 12 else k % 2 for k in range(13)]}
    data = datasets.Dataset.from_dict(held, features=features)
    monkeypatch.setattr(datasets, "get_dataset_split_names", lambda name, config: ["train"])
    monkeypatch.setattr(datasets, "load_dataset", lambda name, config, split: data)
    found = look(tmp_path, "hub:someone/some-set", bad_rows="drop")
    assert found.dataset is not None and found.dataset.labels == ("ham", "spam")
    assert "row 13" in told(found)
    assert "`test`" in told(look(tmp_path, "hub:someone/some-set::test"))


# Parts against each other


def test_a_label_that_train_lacks_is_named_with_its_lines(tmp_path: Path) -> None:
    write(tmp_path, "train.csv", csv_text(rows(12)))
    held_out = [("new a", "loan"), ("new b", "lamp"), ("new c", "loan"), ("new d", "lamp")]
    write(tmp_path, "eval.csv", csv_text(held_out))
    found = look(tmp_path, eval="eval.csv")
    assert len(found.faults) == 1
    text = str(found.faults[0])
    assert "`lamp` in 2 rows" in text and "eval.csv, lines 3 and 5" in text and "loan and room" in text


def test_a_label_that_reads_alike_is_offered(tmp_path: Path) -> None:
    write(tmp_path, "train.csv", csv_text([(t, f"{k % 2}.0") for k, (t, _) in enumerate(rows(12))]))
    write(tmp_path, "test.csv", csv_text([("new a", "1"), ("new b", "0.0")]))
    assert "`1.0`" in look(tmp_path, test="test.csv").faults[0].remedy


def test_a_class_that_eval_lacks_is_no_fault(tmp_path: Path) -> None:
    write(tmp_path, "train.csv", csv_text(rows(12)))
    write(tmp_path, "eval.csv", csv_text([("new a", "loan")]))
    assert look(tmp_path, eval="eval.csv").faults == []


def test_one_class_is_a_fault(tmp_path: Path) -> None:
    write(tmp_path, "train.csv", csv_text([(t, "spam") for t, _ in rows(12)]))
    assert "two labels" in told(look(tmp_path)) and "`spam`" in told(look(tmp_path))


def test_the_faults_of_all_files_come_at_once(tmp_path: Path) -> None:
    write(tmp_path, "train.csv", csv_text([*rows(12), ("", "loan")]))
    write(tmp_path, "eval.csv", csv_text([("new", "lamp")]))
    found = look(tmp_path, eval="eval.csv", test="gone.csv", chat_template="gone.jinja")
    places = "\n".join(fault.place for fault in found.faults)
    assert len(found.faults) == 4
    assert all(part in places for part in ("train.csv, line 14", "eval.csv, line 2", "gone.csv", "data.chat_template"))
    with pytest.raises(DataError) as caught:
        load(DataSpec(train="train.csv", test="gone.csv"), "classification", tmp_path)
    assert len(caught.value.faults) == 2


def test_rows_that_train_has_too_are_left_out_and_counted(tmp_path: Path) -> None:
    write(tmp_path, "train.csv", csv_text(rows(12)))
    write(
        tmp_path,
        "eval.csv",
        csv_text([("only here", "loan"), ("in both", "room"), ("  text  number 1 of room ", "room")]),
    )
    write(tmp_path, "test.csv", csv_text([("in  both", "room"), ("text number 2 of loan", "loan")]))
    found = look(tmp_path, eval="eval.csv", test="test.csv")
    assert texts(found, "eval") == ["only here"] and texts(found, "test") == ["in  both"]
    assert "eval.csv, line 4" in told(found) and "test.csv, line 3" in told(found) and "eval.csv, line 3" in told(found)
    assert found.dataset is not None and found.dataset.facts["shared"] == {
        "test": {"train": 1},
        "eval": {"train": 1, "test": 1},
    }


def test_an_eval_that_is_the_training_file_again_is_a_fault(tmp_path: Path) -> None:
    write(tmp_path, "train.csv", csv_text(rows(12)))
    assert "eval must keep" in told(look(tmp_path, eval="train.csv"))


def test_a_text_with_two_labels_is_told_and_stays_in_one_part(tmp_path: Path) -> None:
    write(tmp_path, "train.csv", csv_text([*rows(20), ("same", "loan"), ("same ", "room")]))
    found = look(tmp_path)
    assert "'same' is loan and room (train.csv, lines 22 and 23)" in told(found)
    assert found.dataset is not None
    assert [sum(key == "same" for key in part.keys()) for part in found.dataset.parts.values()].count(2) == 1


def test_the_split_is_stratified_seeded_and_whole(tmp_path: Path) -> None:
    pairs = [(f"t {k}", "abc"[0 if k < 100 else 1 if k < 160 else 2]) for k in range(200)]
    write(tmp_path, "train.csv", csv_text(pairs))
    found = look(tmp_path)
    assert sorted(texts(found)) == sorted(t for t, _ in pairs)
    assert found.dataset is not None
    counts = {part: held["classes"] for part, held in found.dataset.facts["parts"].items()}
    assert counts == {
        "train": {"a": 70, "b": 42, "c": 28},
        "eval": {"a": 15, "b": 9, "c": 6},
        "test": {"a": 15, "b": 9, "c": 6},
    }
    other = gather(DataSpec(train="train.csv"), "classification", tmp_path, seed=1)
    assert set(texts(other, "test")) != set(texts(found, "test"))


def test_the_split_does_not_depend_on_the_order_of_the_rows(tmp_path: Path) -> None:
    write(tmp_path, "train.csv", csv_text(rows(60)))
    first = set(texts(look(tmp_path), "test"))
    write(tmp_path, "train.csv", csv_text(rows(60)[::-1]))
    assert set(texts(look(tmp_path), "test")) == first


def test_copies_of_a_text_stay_together(tmp_path: Path) -> None:
    write(tmp_path, "train.csv", csv_text([pair for pair in rows(40) for _ in range(3)]))
    found = look(tmp_path)
    parts = [set(texts(found, part)) for part in ("train", "eval", "test")]
    assert len(parts[0] | parts[1] | parts[2]) == sum(map(len, parts)) == 40
    assert len(texts(found, "test")) == 18


def test_classes_too_rare_for_every_part_stay_in_train_and_are_named(tmp_path: Path) -> None:
    rare = [("card one", "card"), ("card two", "card"), ("a gate", "gate"), *[("same lamp", "lamp")] * 5]
    write(tmp_path, "train.csv", csv_text([*rows(52), *rare]))
    found = look(tmp_path)
    assert found.dataset is not None
    classes = {part: held["classes"] for part, held in found.dataset.facts["parts"].items()}
    assert classes["train"]["card"] == 2 and classes["train"]["gate"] == 1 and classes["train"]["lamp"] == 5
    assert classes["eval"]["loan"] + classes["eval"]["room"] == 9 == len(texts(found, "test"))
    assert "card (2 rows), gate (1) and lamp (5)" in told(found)


def test_a_class_of_three_rows_stands_in_every_part(tmp_path: Path) -> None:
    write(tmp_path, "train.csv", csv_text([*rows(100), ("x one", "x"), ("x two", "x"), ("x three", "x")]))
    found = look(tmp_path)
    assert found.dataset is not None
    assert [held["classes"]["x"] for held in found.dataset.facts["parts"].values()] == [1, 1, 1]


def test_more_classes_than_rows_to_split_off_still_gives_the_fraction(tmp_path: Path) -> None:
    write(tmp_path, "train.csv", csv_text([(f"t {k} {copy}", f"class {k}") for k in range(60) for copy in range(3)]))
    found = look(tmp_path)
    assert len(texts(found, "test")) == len(texts(found, "eval")) == 27


def test_rows_that_are_all_too_rare_are_a_fault_that_names_them(tmp_path: Path) -> None:
    write(tmp_path, "train.csv", csv_text([(f"t {k}", f"class {k}") for k in range(5)]))
    assert "class 0 (1 text)" in told(look(tmp_path)) and "3 different texts" in told(look(tmp_path))


def test_only_the_parts_that_are_missing_are_split_off(tmp_path: Path) -> None:
    write(tmp_path, "train.csv", csv_text(rows(40)))
    write(tmp_path, "test.csv", csv_text(rows(7, 100)))
    found = look(tmp_path, test="test.csv")
    assert texts(found, "test") == [t for t, _ in rows(7, 100)]
    assert len(texts(found, "eval")) == 6 and len(texts(found, "train")) == 34


def test_sentence_pairs_are_one_text_to_the_split(tmp_path: Path) -> None:
    lines = ["a,b,label", *(f"same,second {k // 2},{LABELS[k // 2 % 2]}" for k in range(40))]
    write(tmp_path, "train.csv", "\n".join(lines))
    found = look(tmp_path, text=["a", "b"])
    assert found.dataset is not None
    seen = [set(part.cells["text_pair"]) for part in found.dataset.parts.values()]
    assert sum(map(len, seen)) == 20
    assert "`c`" in told(look(tmp_path, text=["a", "c"]))


def test_fractions_that_leave_nothing_are_not_blamed_twice(tmp_path: Path) -> None:
    write(tmp_path, "train.csv", csv_text(rows(12)))
    found = look(tmp_path, eval_fraction=0.7, test_fraction=0.5)
    assert found.dataset is None and found.faults == []  # the spec's own check has told it


def test_files_are_checked_without_a_tokenizer(tmp_path: Path) -> None:
    write(tmp_path, "train.csv", csv_text(rows(12)))
    checked = check_data(DataSpec(train="train.csv"), "classification", tmp_path, None)
    assert checked.dataset is not None and checked.prepared is None and checked.faults == ()


def test_the_facts_are_plain_json_and_say_the_same_each_time(tmp_path: Path) -> None:
    write(tmp_path, "train.csv", csv_text([*rows(30), ("", "loan")]))
    first, second = (look(tmp_path, bad_rows="drop").dataset for _ in range(2))
    assert first is not None and second is not None
    assert json.dumps(first.facts, allow_nan=False) == json.dumps(second.facts)
    assert first.facts["sources"]["train"]["left_out"] == [
        {"file": "train.csv", "why": "an empty `text`", "count": 1, "lines": [32]}
    ]
