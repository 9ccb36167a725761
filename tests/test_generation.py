"""Generation by tiny random decoders: what the loss counts, what padding and accumulation change, what is written."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from ranksearch.data import Split
from ranksearch.training import AdapterRun, Workbench, evaluate_saved, train, truncation_curve, zero_shot
from ranksearch.training.batches import Part
from ranksearch.training.evaluation import evaluate
from ranksearch.training.tasks.generation import Generation
from ranksearch.training.tasks.writing import chosen_rows, question_and_answer, write
from tests.tiny_models import VOCAB, make_answers, make_config, make_generation, save_decoder

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Workbench:
    return make_generation(tmp_path_factory.mktemp("decoder"))


def by_hand(bench: Workbench, split: Split) -> tuple[float, int]:
    """Nats and number of the trained tokens, row by row, from all logits."""
    nats, tokens = 0.0, 0
    for i in range(len(split)):
        ids, marks = torch.from_numpy(split.row(i)).long(), split.trained[split.span(i)]  # type: ignore[index]
        with torch.no_grad():
            logs = bench.base(ids[None]).logits[0].double().log_softmax(-1)
        for k in np.flatnonzero(marks):
            nats -= float(logs[k - 1, ids[k]])
            tokens += 1
    return nats, tokens


def part_of(split: Split, pad_id: int = 0) -> Part:
    return Part(split, pad_id, torch.device("cpu"))


def summed_loss(bench: Workbench, split: Split, pad_id: int = 0) -> float:
    part = part_of(split, pad_id)
    with torch.no_grad():
        return float(bench.task.loss(bench.base, part, part.batch(np.arange(len(part)))))


def test_the_loss_is_that_of_the_marked_tokens_given_all_before_them(bench: Workbench) -> None:
    split = make_answers(12, 5)
    nats, tokens = by_hand(bench, split)
    part = part_of(split)
    assert summed_loss(bench, split) == pytest.approx(nats, rel=1e-5)
    assert bench.task.weight(part, np.arange(12)) == tokens
    metrics = evaluate(bench.base, bench.task, part, bench.device)
    assert metrics["nll"] == pytest.approx(nats / tokens, rel=1e-5)


def test_bits_per_byte_are_nats_over_ln_2_and_bytes(bench: Workbench) -> None:
    split = make_answers(7, 6)
    nats, _ = by_hand(bench, split)
    found = evaluate(bench.base, bench.task, part_of(split), bench.device)["bits_per_byte"]
    assert split.target_bytes is not None
    assert found == pytest.approx(nats / math.log(2) / int(split.target_bytes.sum()), rel=1e-5)


def test_tokens_that_are_not_marked_have_no_loss_of_their_own(bench: Workbench) -> None:
    # The last token is seen by none: unmarked, it may be any.
    split = make_answers(6, 7)
    marks = split.trained.copy()  # type: ignore[union-attr]
    marks[split.offsets[1:] - 1] = False
    other = split.ids.copy()
    other[split.offsets[1:] - 1] = VOCAB - 1
    unmarked = replace(split, trained=marks)
    assert summed_loss(bench, replace(unmarked, ids=other)) == summed_loss(bench, unmarked)
    assert summed_loss(bench, replace(split, ids=other)) != pytest.approx(summed_loss(bench, split), rel=1e-3)


def test_neither_padding_nor_the_padding_token_changes_a_rows_loss(bench: Workbench) -> None:
    split = make_answers(10, 8)
    alone = 0.0
    for i in range(len(split)):
        row = replace(
            split, ids=split.row(i), offsets=np.array([0, len(split.row(i))]), trained=split.trained[split.span(i)],  # type: ignore[index]
        )  # fmt: skip
        alone += summed_loss(bench, row)
    assert summed_loss(bench, split, pad_id=0) == pytest.approx(alone, rel=1e-5)
    # The end of text as padding, as with decoders that have no token of their own for it.
    assert summed_loss(bench, split, pad_id=2) == summed_loss(bench, split, pad_id=0)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_batch_in_eight_parts_is_trained_as_the_whole_one(tmp_path: Path, family: str) -> None:
    after = []
    for parts in (1, 8):
        bench = make_generation(tmp_path / str(parts), family, gradient_accumulation=parts)
        with AdapterRun(bench, make_config(batch_size=16), seed=3, max_steps=6) as run:
            loss = run.advance(6)["train/loss"]
            after.append((loss, run.state_dict()["tensors"]))
    assert after[0][0] == pytest.approx(after[1][0], rel=1e-5)
    for name, tensor in after[0][1].items():
        # As a whole: Adam divides by the gradient's size, so where one is near 0 its rounding decides.
        assert (after[1][1][name] - tensor).norm() <= 1e-4 * tensor.norm(), name


def test_accumulated_gradients_are_those_of_the_large_batch(bench: Workbench) -> None:
    part, rows = bench.parts["train"], np.arange(24)
    gradients = []
    with AdapterRun(bench, make_config(), seed=0, max_steps=4) as run:
        run.advance(2)
        for parts in (1, 8):
            for some in np.array_split(rows, parts):
                (bench.task.loss(run.model, part, part.batch(some)) / bench.task.weight(part, rows)).backward()
            gradients.append({n: p.grad.clone() for n, p in run.model.named_parameters() if p.grad is not None})
            run.model.zero_grad()
    assert gradients[0] and set(gradients[0]) == set(gradients[1])
    for name, gradient in gradients[0].items():
        assert (gradients[1][name] - gradient).abs().max() <= 1e-5 * gradient.abs().max(), name


def test_a_run_learns_saves_and_comes_back_with_what_it_scored(bench: Workbench, tmp_path: Path) -> None:
    before = {n: p.clone() for n, p in bench.base.named_parameters()}
    told: list[dict[str, float]] = []
    outcome = train(
        bench, make_config(learning_rate=2e-2, r=8), lambda step, m: told.append(dict(m)) or "continue",
        seed=0, max_steps=60, rungs=[20],
    )  # fmt: skip
    assert outcome.state == "complete" and outcome.run is not None
    assert told[-1]["eval/nll"] < zero_shot(bench, "eval")["eval/nll"] - 1
    measured = outcome.run.evaluate("test", write=True)
    outcome.run.save(tmp_path / "adapter")
    assert evaluate_saved(bench, tmp_path / "adapter", "test") == pytest.approx(measured, rel=1e-5)
    assert 0 <= measured["test/exact_match"] <= 1 and 0 < measured["test/chrf"] <= 100
    assert all(torch.equal(p, before[n]) for n, p in bench.base.named_parameters())
    points = list(truncation_curve(outcome.run, [2, 4], "eval"))
    assert [p.r for p in points] == [2, 2, 4, 4] and all(p.metrics["eval/nll"] > 0 for p in points)


def test_what_is_written_is_what_each_prompt_alone_would_get(tmp_path: Path) -> None:
    for family in ("llama", "gpt2"):
        bench = make_generation(tmp_path / family, family)
        split = bench.parts["eval"].split
        prompts = [question_and_answer(split, row)[0] for row in range(14)]
        assert len({len(p) for p in prompts}) > 5
        written = write(bench.base, prompts, {2}, 9)
        greedy = GenerationConfig(max_new_tokens=9, do_sample=False, pad_token_id=0, eos_token_id=2)
        for prompt, got in zip(prompts, written, strict=True):
            ids = torch.tensor([prompt])
            alone = bench.base.generate(  # type: ignore[operator]
                ids, attention_mask=torch.ones_like(ids), generation_config=greedy, use_cache=False
            )[0, len(prompt) :].tolist()
            assert got[: len(alone)] == alone


def test_a_checkpoints_own_settings_do_not_change_what_is_written(bench: Workbench) -> None:
    prompts = [question_and_answer(bench.parts["eval"].split, row)[0] for row in range(5)]
    plain = write(bench.base, prompts, {2}, 6)
    own = bench.base.generation_config
    try:
        bench.base.generation_config = GenerationConfig(repetition_penalty=9.0, suppress_tokens=[plain[0][0]])
        assert write(bench.base, prompts, {2}, 6) == plain
    finally:
        bench.base.generation_config = own


def test_an_exact_answer_matches_and_a_near_one_scores_by_its_letters(tmp_path: Path) -> None:
    bench = make_generation(tmp_path)
    split = make_answers(20, 9)
    prompts, answers = zip(*(question_and_answer(split, row) for row in range(20)), strict=True)
    assert all(answer[-1] == 2 and 2 not in answer[:-1] for answer in answers)
    written = write(bench.base, prompts, {2}, 5)
    ids = [np.array([*p, *w], dtype=np.int32) for p, w in zip(prompts, written, strict=True)]
    offsets = np.concatenate([[0], np.cumsum([len(i) for i in ids])])
    marks = np.concatenate([np.arange(len(i)) >= len(p) for i, p in zip(ids, prompts, strict=True)])
    same = Split(np.concatenate(ids), offsets, trained=marks, target_bytes=np.full(20, 5), whole=np.ones(20, bool))
    assert bench.task.written(bench.base, part_of(same)) == {"exact_match": 1.0, "chrf": pytest.approx(100)}
    scores = bench.task.written(bench.base, part_of(split))
    assert scores["exact_match"] < 1 and scores["chrf"] < 100


def test_the_rows_that_are_written_to_are_whole_ones_and_always_the_same() -> None:
    split = make_answers(200, 1)
    whole = np.arange(200) % 2 == 0
    rows = chosen_rows(replace(split, whole=whole))
    assert len(rows) == 64 and not (rows % 2).any()
    assert (chosen_rows(replace(split, whole=whole)) == rows).all()
    assert len(chosen_rows(replace(split, whole=np.zeros(200, dtype=bool)))) == 64


def test_of_a_chat_the_last_answer_is_asked_for() -> None:
    ids = np.arange(10, 20, dtype=np.int32)
    marks = np.array([0, 0, 1, 1, 0, 0, 1, 1, 1, 0], dtype=bool)
    question, answer = question_and_answer(Split(ids, np.array([0, 10]), trained=marks), 0)
    assert question == list(range(10, 16)) and answer == [16, 17, 18]


def test_text_is_written_only_where_it_is_asked_for(tmp_path: Path) -> None:
    bench = make_generation(tmp_path / "a")
    always = make_generation(tmp_path / "b", always_write=True)
    config = make_config()
    with (
        AdapterRun(bench, config, seed=0, max_steps=2) as run,
        AdapterRun(always, config, seed=0, max_steps=2) as other,
    ):
        assert set(run.evaluate("eval")) == {"eval/nll", "eval/bits_per_byte"}
        assert set(other.evaluate("eval")) == {"eval/nll", "eval/bits_per_byte", "eval/exact_match", "eval/chrf"}


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("gemma2", {"head_dim": 16, "final_logit_softcapping": 5.0, "query_pre_attn_scalar": 16}),
        ("cohere", {"logit_scale": 0.25}),
        ("granite", {"logits_scaling": 3.0}),
        ("qwen3", {"head_dim": 16}),
        ("gpt_neox", {}),
        ("opt", {"ffn_dim": 64, "word_embed_proj_dim": 32}),
        ("phi", {}),
        ("bloom", {}),
        ("mistral", {"sliding_window": 4}),
    ],
)
def test_every_familys_own_logits_are_kept_and_its_padding_is_unseen(kind: str, values: dict[str, object]) -> None:
    config = AutoConfig.for_model(
        kind, vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        intermediate_size=64, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        initializer_range=0.3, **values,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    task = Generation((2,), lambda: pytest.fail("no text is written here"))
    split = make_answers(8, 2)
    part = part_of(split)
    expected = 0.0
    for i in range(len(split)):
        ids, marks = torch.from_numpy(split.row(i)).long(), torch.from_numpy(split.trained[split.span(i)])  # type: ignore[index]
        with torch.no_grad():
            logs = model(ids[None]).logits[0].log_softmax(-1)
        expected -= float(logs[:-1].gather(1, ids[1:, None])[:, 0][marks[1:]].sum())
    with torch.no_grad():
        assert float(task.loss(model, part, part.batch(np.arange(8)))) == pytest.approx(expected, rel=1e-4)


def test_the_tied_output_layer_is_never_adapted(tmp_path: Path) -> None:
    bench = make_generation(tmp_path, "gpt2")
    assert bench.facts.tied_modules == ("lm_head",) and not bench.facts.head_modules
    with AdapterRun(bench, make_config(), seed=0, max_steps=2) as run:
        assert not any("lm_head" in n or "wte" in n for n, p in run.model.named_parameters() if p.requires_grad)


def test_a_decoder_of_a_missing_output_layer_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    from ranksearch.errors import DataError
    from ranksearch.training.model import load_model

    source = save_decoder(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(DataError, match=r"every weight.*lm_head"):
        load_model(source, "generation", 0, torch.float32)
