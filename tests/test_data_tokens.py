"""Tokenising: lengths, cuts, pairs, completions and chats, with tokenizers made here."""

from __future__ import annotations

import dataclasses
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from ranksearch.data import Checked, Prepared, check_data, load_tokenizer
from ranksearch.errors import DataError, StoreError
from ranksearch.spec import DataSpec

WORDS = "a b c d e f g h renew the atlas room is cold yes no user assistant".split()
ROLES = ["<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]
TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|> ' }}{{ m['content'] }}{{ ' </s>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|> ' }}{% endif %}"
)
CALLS = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|> ' }}{{ m['content'] }}"
    "{% if m.tool_calls is defined %}{% for c in m.tool_calls %}{{ ' ' + c.function.name }}{% endfor %}{% endif %}"
    "{{ ' </s>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|> ' }}{% endif %}"
)


def vocabulary(*special: str) -> dict[str, int]:
    return {word: k for k, word in enumerate([*special, *WORDS])}


def bert(**keys: Any) -> PreTrainedTokenizerFast:
    made = Tokenizer(models.WordLevel(vocabulary("[PAD]", "[UNK]", "[CLS]", "[SEP]"), unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    special: dict[str, Any] = {"unk_token": "[UNK]", "pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    inputs = {"model_input_names": ["input_ids", "token_type_ids", "attention_mask"], "model_max_length": 32}
    return PreTrainedTokenizerFast(tokenizer_object=made, **(special | inputs | keys))


def llama(template: str | None = None, **keys: Any) -> PreTrainedTokenizerFast:
    made = Tokenizer(models.WordLevel(vocabulary("<pad>", "<unk>", "<s>", "</s>", *ROLES), unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special: dict[str, Any] = {"unk_token": "<unk>", "pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    extra = {"additional_special_tokens": ROLES, "model_max_length": 64}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, **(special | extra | keys))
    tokenizer.chat_template = template
    return tokenizer


def sentences(n: int, words: int = 4) -> list[str]:
    """Distinct texts of so many words, numbered in base eight by the first letters."""
    return [" ".join("abcdefgh"[k >> 3 * place & 7] for place in range(words)) for k in range(n)]


def check(
    folder: Path, lines: list[dict[str, Any]], tokenizer: Any, task: Any = "classification", **keys: Any
) -> Checked:
    (folder / "train.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    return check_data(DataSpec.model_validate({"train": "train.jsonl"} | keys), task, folder, tokenizer)


def prepared(found: Checked) -> Prepared:
    assert found.prepared is not None, found.faults
    return found.prepared


def labelled(texts: list[str]) -> list[dict[str, Any]]:
    return [{"text": t, "label": "xy"[k % 2]} for k, t in enumerate(texts)]


# Classification


def test_rows_become_flat_arrays_that_decode_to_the_texts(tmp_path: Path) -> None:
    tokenizer = bert()
    found = check(tmp_path, labelled(sentences(40)), tokenizer)
    data = prepared(found)
    assert found.dataset is not None
    for part in ("train", "eval", "test"):
        split, rows = getattr(data, part), found.dataset.parts[part]
        assert split.ids.dtype == np.int32 and split.offsets.dtype == np.int64 and split.labels.dtype == np.int64
        texts = [tokenizer.decode(split.row(i), skip_special_tokens=True) for i in range(len(split))]
        assert texts == rows.cells["text"]
        assert [data.labels[k] for k in split.labels] == rows.cells["label"]
    assert data.train.token_type_ids is None and data.pad_id == 0


def test_the_length_found_out_covers_99_percent_of_the_training_rows_and_is_told(tmp_path: Path) -> None:
    texts = [*sentences(396, 5), *[" ".join(["atlas"] * 20 + [w]) for w in "abcd"]]
    found = check(tmp_path, labelled(texts), bert(), eval_fraction=0.1, test_fraction=0.1)
    data = prepared(found)
    assert data.max_length == 7
    assert max(int(s.lengths.max()) for s in (data.train, data.eval, data.test)) == 7
    assert sum(data.facts["max_length"]["rows_cut"].values()) == 4
    assert any("max_length: 7 tokens" in note for note in found.notes)
    assert any("cut on the right" in note and "23 tokens" in note for note in found.notes)


def test_the_length_found_out_stays_within_the_models_limit(tmp_path: Path) -> None:
    texts = [" ".join([*"a b c d e f g h".split() * 6, w, v]) for w in "abcdefgh" for v in "abcde"]
    found = check(tmp_path, labelled(texts), bert())
    assert prepared(found).max_length == 32 and any("the model's limit" in note for note in found.notes)


def test_cut_rows_keep_their_beginning_and_the_closing_token(tmp_path: Path) -> None:
    tokenizer = bert(truncation_side="left")
    data = prepared(check(tmp_path, labelled(sentences(40, 6)), tokenizer, max_length=5))
    row = tokenizer.convert_ids_to_tokens(data.train.row(0).tolist())
    assert row[0] == "[CLS]" and row[-1] == "[SEP]" and len(row) == 5
    assert data.facts["max_length"]["rows_cut"]["train"] == len(data.train)
    assert tokenizer.truncation_side == "left"


def test_a_length_beyond_the_models_or_without_room_for_text_is_a_fault(tmp_path: Path) -> None:
    assert "32" in str(check(tmp_path, labelled(sentences(40)), bert(), max_length=33).faults[0])
    assert "data.max_length" in str(check(tmp_path, labelled(sentences(40)), bert(), max_length=2).faults[0])


def test_sentence_pairs_carry_token_types(tmp_path: Path) -> None:
    lines = [{"one": t, "two": "room is", "label": "xy"[k % 2]} for k, t in enumerate(sentences(40))]
    split = prepared(check(tmp_path, lines, bert(), text=["one", "two"])).train
    assert split.token_type_ids is not None
    assert split.token_type_ids[split.span(0)].tolist() == [0] * 6 + [1] * 3


def test_texts_that_become_no_token_are_left_out_and_told(tmp_path: Path) -> None:
    tokenizer = bert()
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace("zzz", "")
    lines = [*labelled(sentences(40)), {"text": "zzz", "label": "x"}]
    (tmp_path / "test.jsonl").write_text('{"text": "zzz zzz", "label": "x"}\n{"text": "is cold", "label": "y"}')
    found = check(tmp_path, lines, tokenizer, test="test.jsonl")
    assert len(prepared(found).test) == 1
    assert any("test.jsonl, line 1" in note for note in found.notes)


def test_a_tokenizer_without_padding_gets_a_masked_stand_in_that_is_told(tmp_path: Path) -> None:
    found = check(tmp_path, labelled(sentences(40)), llama(pad_token=None))
    assert prepared(found).pad_id == 3 and any("no padding token" in note for note in found.notes)


def test_a_tokenizer_that_does_not_know_the_words_is_told(tmp_path: Path) -> None:
    found = check(tmp_path, labelled([f"strange {w} words" for w in sentences(40)]), bert())
    assert any("unknown to this tokenizer" in note for note in found.notes)


# What is kept of it


def test_prepared_data_survives_disk_and_pickle(tmp_path: Path) -> None:
    data = prepared(check(tmp_path, labelled(sentences(40)), bert()))
    data.save(tmp_path / "kept")
    assert sorted(p.name for p in (tmp_path / "kept").iterdir()) == ["prepared.json", "prepared.npz"]
    for copy in (Prepared.load(tmp_path / "kept"), pickle.loads(pickle.dumps(data))):
        assert (copy.labels, copy.facts, copy.notes, copy.max_length) == (
            data.labels,
            data.facts,
            data.notes,
            data.max_length,
        )
        for part in ("train", "eval", "test"):
            for field in dataclasses.fields(data.train):
                mine, theirs = (getattr(getattr(d, part), field.name) for d in (data, copy))
                assert (mine is None) == (theirs is None)
                if mine is not None:
                    assert mine.dtype == theirs.dtype and np.array_equal(mine, theirs)


def test_data_kept_before_there_were_several_tasks_is_read(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    prepared(check(tmp_path, labelled(sentences(40)), bert())).save(kept)
    meta = json.loads((kept / "prepared.json").read_text())
    for later in ("ends", "tasks", "weights"):
        del meta[later]
    (kept / "prepared.json").write_text(json.dumps(meta))
    assert Prepared.load(kept).tasks == ()
    del meta["labels"]
    (kept / "prepared.json").write_text(json.dumps(meta))
    with pytest.raises(StoreError, match="labels"):
        Prepared.load(kept)


def test_damaged_prepared_data_is_refused(tmp_path: Path) -> None:
    prepared(check(tmp_path, labelled(sentences(40)), bert())).save(tmp_path / "kept")
    path = tmp_path / "kept" / "prepared.npz"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(StoreError, match="Remove the folder"):
        Prepared.load(tmp_path / "kept")


def test_each_part_has_a_hash_that_changes_with_its_rows_only(tmp_path: Path) -> None:
    first = prepared(check(tmp_path, labelled(sentences(40)), bert())).facts["parts"]
    again = prepared(check(tmp_path, labelled(sentences(40)), llama())).facts["parts"]
    other = prepared(check(tmp_path, labelled(sentences(41)), bert())).facts["parts"]
    assert [first[p]["sha256"] for p in first] == [again[p]["sha256"] for p in again]
    assert first["train"]["sha256"] != other["train"]["sha256"]


# Prompts and completions


def completions(n: int, prompt_words: int = 3, completion: str = "yes no") -> list[dict[str, Any]]:
    return [{"prompt": t, "completion": completion} for t in sentences(n, prompt_words)]


def test_only_the_completion_and_its_end_are_trained(tmp_path: Path) -> None:
    tokenizer = llama()
    data = prepared(check(tmp_path, completions(40), tokenizer, "generation"))
    split = data.train
    assert split.trained is not None and split.labels is None
    span = split.span(0)
    assert tokenizer.convert_ids_to_tokens(split.ids[span][split.trained[span]].tolist()) == ["yes", "no", "</s>"]
    assert len(split.row(0)) == 6


def test_a_leading_token_is_put_in_front_and_never_trained(tmp_path: Path) -> None:
    tokenizer = llama()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A $B </s>", special_tokens=[("<s>", 2), ("</s>", 3)]
    )
    split = prepared(check(tmp_path, completions(40), tokenizer, "generation")).train
    assert split.trained is not None
    tokens = tokenizer.convert_ids_to_tokens(split.row(0).tolist())
    assert tokens[0] == "<s>" and tokens[-3:] == ["yes", "no", "</s>"] and tokens.count("</s>") == 1
    assert split.trained[split.span(0)].tolist() == [False] * 4 + [True] * 3


def test_completions_cut_away_whole_are_left_out_counted_and_a_length_is_offered(tmp_path: Path) -> None:
    lines = [*completions(20), *[{"prompt": f"{t} is is is is is", "completion": "yes no"} for t in sentences(8, 3)]]
    (tmp_path / "test.jsonl").write_text(
        "\n".join(json.dumps({"prompt": p, "completion": "yes no"}) for p in ("cold", "cold " * 5, "cold " * 6))
    )
    found = check(tmp_path, lines, llama(), "generation", max_length=6, test="test.jsonl")
    data = prepared(found)
    assert len(data.test) == 2 and len(data.train) + len(data.eval) == 20
    assert all(bool(s.trained[s.span(i)].any()) for s in (data.train, data.eval, data.test) for i in range(len(s)))
    told = "\n".join(found.notes)
    assert "8 of 28 rows (lines 21, 22" in told and "1 of 3 rows (line 3)" in told
    assert "in part: 1 of 3 rows (line 2)" in told and "max_length 11 would keep every row whole" in told


def test_an_empty_completion_is_a_bad_row(tmp_path: Path) -> None:
    lines = [*completions(20), {"prompt": "is cold", "completion": " "}]
    assert "train.jsonl, line 21" in check(tmp_path, lines, llama(), "generation").faults[0].place


def test_a_part_that_keeps_no_row_is_a_fault(tmp_path: Path) -> None:
    found = check(tmp_path, completions(20), llama(), "generation", max_length=3)
    assert {fault.rule.split()[0] for fault in found.faults} == {"train", "eval", "test"}


# Chats


def chat(*turns: tuple[str, Any], **last: Any) -> dict[str, Any]:
    made = [{"role": role, "content": content} for role, content in turns]
    made[-1] |= last
    return {"messages": made}


def plain_chats(n: int) -> list[dict[str, Any]]:
    return [chat(("user", t), ("assistant", "yes")) for t in sentences(n)]


def check_chats(folder: Path, lines: list[dict[str, Any]], template: str = TEMPLATE, **keys: Any) -> Checked:
    return check(folder, lines, llama(template), "generation", messages="messages", **keys)


def trained_words(data: Prepared) -> list[list[str]]:
    tokenizer = llama()
    parts = (data.train, data.eval, data.test)
    return [
        tokenizer.convert_ids_to_tokens(s.ids[s.span(i)][s.trained[s.span(i)]].tolist())  # type: ignore[index]
        for s in parts
        for i in range(len(s))
    ]


def test_loss_counts_on_the_assistants_turns_with_their_ends_only(tmp_path: Path) -> None:
    talk = [("system", "no"), ("user", "is cold"), ("assistant", "yes"), ("user", "renew"), ("assistant", "the atlas")]
    found = check_chats(tmp_path, [*plain_chats(20), chat(*talk)])
    words = trained_words(prepared(found))
    assert sorted(map(len, words)) == [2] * 20 + [5]
    assert ["yes", "</s>", "the", "atlas", "</s>"] in words and ["yes", "</s>"] in words


def test_chats_that_can_not_be_shown_are_named_with_their_lines(tmp_path: Path) -> None:
    call = [{"type": "function", "function": {"name": "look_up", "arguments": {"n": 1}}}]
    lines = [
        *plain_chats(12),
        chat(("user", "a"), ("assistant", None), tool_calls=call),
        chat(("user", "b"), ("assistant", "")),
        chat(("user", None), ("assistant", "yes")),
        chat(("user", "c"), ("assistant", [{"type": "image"}])),
        chat(("user", "d"), ("assistant", None)),
    ]
    found = check_chats(tmp_path, lines)
    assert found.prepared is None
    assert {fault.place for fault in found.faults} == {
        "train.jsonl, line 13",
        "train.jsonl, line 14",
        "train.jsonl, lines 15 and 17",
        "train.jsonl, line 16",
    }
    kept = check_chats(tmp_path, lines, bad_rows="drop")
    assert sorted(map(len, trained_words(prepared(kept)))) == [2] * 12
    assert sum(one["count"] for one in prepared(kept).facts["left_out"]) == 5


def test_a_template_that_shows_tool_calls_trains_them(tmp_path: Path) -> None:
    call = [{"type": "function", "function": {"name": "renew", "arguments": "{}"}}]
    found = check_chats(tmp_path, [*plain_chats(20), chat(("user", "a"), ("assistant", None), tool_calls=call)], CALLS)
    words = trained_words(prepared(found))
    assert ["renew", "</s>"] in words and not any("None" in w for w in words)


def test_an_empty_answer_beside_a_real_one_is_not_trained(tmp_path: Path) -> None:
    talk = chat(("user", "a"), ("assistant", ""), ("user", "b"), ("assistant", "no"))
    words = trained_words(prepared(check_chats(tmp_path, [*plain_chats(20), talk])))
    assert ["no", "</s>"] in words and ["</s>"] not in words


def test_contents_given_as_lists_of_texts_are_joined_and_told(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "the "}, {"type": "text", "text": "atlas"}]
    found = check_chats(tmp_path, [*plain_chats(20), chat(("user", "a"), ("assistant", parts))])
    assert ["the", "atlas", "</s>"] in trained_words(prepared(found))
    assert any("1 chat with contents given as lists" in note for note in found.notes)


def test_a_template_that_leaves_turns_out_or_refuses_them_is_told(tmp_path: Path) -> None:
    lines = [*plain_chats(12), chat(("system", "no"), ("user", "a"), ("assistant", "yes"))]
    silent = TEMPLATE.replace("{% for m in messages %}", "{% for m in messages if m['role'] != 'system' %}")
    assert "line 13" in str(check_chats(tmp_path, lines, silent).faults[0])
    angry = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system turn') }}{% endif %}" + TEMPLATE
    fault = check_chats(tmp_path, lines, angry).faults[0]
    assert "line 13" in str(fault) and "no system turn" in str(fault)


def test_a_chat_template_from_a_file_is_used_and_none_at_all_is_a_fault(tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text(TEMPLATE.replace("' </s>\\n'", "' room </s>\\n'"))
    lines = plain_chats(20)
    own = check(tmp_path, lines, llama(), "generation", messages="messages", chat_template="own.jinja")
    assert trained_words(prepared(own))[0] == ["yes", "room", "</s>"]
    none = check(tmp_path, lines, llama(), "generation", messages="messages")
    assert "chat template" in str(none.faults[0])


@pytest.mark.parametrize(
    ("template", "told"),
    [(" \n", "it is empty"), ("{% for m in messages %}{{ m.role }", "must be Jinja, but got line 1: unexpected '}'")],
)
def test_a_chat_template_that_is_none_is_told_as_such_and_not_as_bad_rows(
    tmp_path: Path, template: str, told: str
) -> None:
    (tmp_path / "own.jinja").write_text(template)
    keys = {"messages": "messages", "chat_template": "own.jinja"}
    (fault,) = check(tmp_path, plain_chats(20), llama(TEMPLATE), "generation", **keys).faults
    assert told in str(fault) and fault.place == "data.chat_template"


def test_chats_in_which_nobody_is_the_assistant_are_left_out_for_that_and_not_for_their_length(tmp_path: Path) -> None:
    found = check_chats(tmp_path, [chat(("user", t), ("bot", "yes")) for t in sentences(20)], bad_rows="drop")
    assert {fault.rule.split()[0] for fault in found.faults} == {"train", "eval", "test"}
    assert all("'bot'" in fault.got and "max_length" not in str(fault) for fault in found.faults)


def test_chats_that_are_no_lists_of_turns_are_named(tmp_path: Path) -> None:
    lines = [*plain_chats(12), {"messages": "hello"}, {"messages": [{"content": "x"}]}, {"messages": None}]
    places = {fault.place for fault in check_chats(tmp_path, lines).faults}
    assert places == {"train.jsonl, lines 13 and 14", "train.jsonl, line 15"}


def test_answers_beyond_the_length_are_left_out_and_counted(tmp_path: Path) -> None:
    lines = [*plain_chats(20), chat(("user", "a " * 10), ("assistant", "yes"))]
    found = check_chats(tmp_path, lines, max_length=8)
    assert len(trained_words(prepared(found))) == 20
    assert any("what the assistant says" in note and "line 21" in note for note in found.notes)


# Loading a tokenizer


def model_folder(folder: Path, tokenizer: Any, **config: Any) -> Path:
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "bert", "pad_token_id": 0} | config))
    return folder


def test_the_limit_is_the_smaller_of_tokenizer_and_model(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "a", bert(), max_position_embeddings=16)
    assert load_tokenizer(str(folder)).model_max_length == 16
    # RoBERTa's positions begin after the padding token's, so the last of its 514 can't be used for text.
    roberta = {"model_type": "roberta", "pad_token_id": 1, "max_position_embeddings": 514}
    folder = model_folder(tmp_path / "b", bert(model_max_length=10**30), **roberta)
    assert load_tokenizer(str(folder)).model_max_length == 512


@pytest.mark.parametrize("where", ["config.json", "tokenizer_config.json"])
def test_a_model_with_code_of_its_own_is_refused_unasked_and_unrun(tmp_path: Path, where: str) -> None:
    folder = model_folder(tmp_path / "model", bert(), model_type="tiny_custom")
    values = json.loads((folder / where).read_text())
    values["auto_map"] = {"AutoConfig": "own_code.Config", "AutoTokenizer": ["own_code.Slow", "own_code.Fast"]}
    (folder / where).write_text(json.dumps(values))
    (folder / "own_code.py").write_text(f"open({str(tmp_path / 'CODE_RAN')!r}, 'w').close()\n")
    code = (
        "from ranksearch.data import load_tokenizer\nfrom ranksearch.errors import DataError\n"
        f"try:\n    load_tokenizer({str(folder)!r})\nexcept DataError as error:\n    print('refused:', error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, capture_output=True, text=True, timeout=300
    )
    assert done.stdout.startswith("refused:") and "own_code.py" in done.stdout and str(folder) in done.stdout
    assert "y/N" not in done.stdout + done.stderr and not (tmp_path / "CODE_RAN").exists()


def test_a_known_family_that_names_code_of_its_own_loads_without_it(tmp_path: Path) -> None:
    folder = model_folder(
        tmp_path / "model", bert(), auto_map={"AutoModel": "own_code.Model"}, max_position_embeddings=16
    )
    (folder / "own_code.py").write_text(f"open({str(tmp_path / 'CODE_RAN')!r}, 'w').close()\n")
    assert load_tokenizer(str(folder)).model_max_length == 16
    assert not (tmp_path / "CODE_RAN").exists()


def test_a_folder_that_is_no_model_is_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"config\.json"):
        load_tokenizer(str(tmp_path))
    with pytest.raises(DataError, match="no such folder"):
        load_tokenizer(str(tmp_path / "gone"))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(DataError, match="JSON"):
        load_tokenizer(str(tmp_path))


def test_a_rows_bytes_are_those_of_its_completion_as_far_as_it_is_kept(tmp_path: Path) -> None:
    pairs = [
        {"prompt": t, "completion": f"yes {'cold ' * (k % 5 + 1)}no"} for k, t in enumerate(sentences(40, words=3))
    ]
    whole = prepared(check(tmp_path, pairs, llama(), "generation"))
    assert whole.ends == (3,)
    for split in (whole.train, whole.eval, whole.test):
        assert split.whole is not None and split.whole.all()
        for k in range(len(split)):
            # yes + colds + no + the end, which has no text.
            colds = int(split.target_tokens[k]) - 3
            assert split.target_bytes is not None and split.target_bytes[k] == len("yes " + "cold " * colds + "no")
    cut = prepared(check(tmp_path, pairs, llama(), "generation", max_length=7)).train
    assert cut.whole is not None and cut.target_bytes is not None and set(cut.whole) == {True, False}
    assert set(cut.target_bytes[~cut.whole]) == {len("yes cold cold no"), len("yes cold cold cold")}


def test_letters_beyond_ascii_count_by_their_bytes_and_marks_of_a_template_not_at_all(tmp_path: Path) -> None:
    pairs = [{"prompt": f"renew {'abcdefgh'[k % 8]} {k}", "completion": "ñandú é"} for k in range(40)]
    assert set(prepared(check(tmp_path, pairs, llama(), "generation")).train.target_bytes) == {10}  # type: ignore[arg-type]
    chats = [
        {"messages": [{"role": "user", "content": f"renew {k}"}, {"role": "assistant", "content": "yes cold"}]}
        for k in range(40)
    ]
    data = prepared(check(tmp_path, chats, llama(TEMPLATE), "generation", messages="messages"))
    assert set(data.train.target_bytes) == {len("yes cold")} and data.ends == (3,)  # type: ignore[arg-type]


def test_roles_that_are_nobodys_are_named(tmp_path: Path) -> None:
    chats = [
        {"messages": [{"role": "human", "content": f"renew {k}"}, {"role": "gpt", "content": "yes"}]} for k in range(9)
    ]
    (fault,) = check(tmp_path, chats, llama(TEMPLATE), "generation", messages="messages").faults
    assert "9 of 9" in str(fault) and "'gpt', 'human'" in str(fault) and "assistant" in str(fault)
