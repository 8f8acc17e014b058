"""Edit everything, then judge everything: no failure becomes a score, no model is there beside the other."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace

import pytest

from truebatch.errors import ConfigError, RunError
from truebatch.scoring.batch_plan import Limits
from truebatch.scoring.runner import RunConfig
from truebatch.scoring.store.export import read_rows
from truebatch_systems.vl_reward.data.dataset import Wanted, decode_image, read_benchmark
from truebatch_systems.vl_reward.data.toy_pictures import (
    PROMPTS,
    ShapesJudge,
    draw_scene,
    edit_picture,
    make_records,
    read_scene,
)
from truebatch_systems.vl_reward.editors import FolderEditor, ScriptedEditor
from truebatch_systems.vl_reward.eval.statistics import summarise
from truebatch_systems.vl_reward.stages import Judging, edit_all, judge_all_edits, pair_seed, picture_name, read_results

HOW = RunConfig(threads=1)
JUDGING = Judging(prompts=PROMPTS)


@pytest.fixture
def pairs(tmp_path):
    path = tmp_path / "benchmark.json"
    path.write_text(json.dumps(make_records(20)))
    return read_benchmark(path, Wanted()).pairs


def right(image, instruction, seed):
    return edit_picture(image, instruction)


def wrong(image, instruction, seed):
    return edit_picture(image, instruction, is_right=False)


def run_both(pairs, folder, edited, judge=None, judging=JUDGING, editors=1):
    edit_all(pairs, [ScriptedEditor(edited) for _ in range(editors)], folder, seed=0, how=HOW)
    judge_all_edits(pairs, lambda: judge or ShapesJudge(), folder, judging, HOW)
    return read_results(pairs, folder)


def test_pictures_say_what_was_drawn(pairs):
    for record in make_records(40, seed=3):
        scene = read_scene(draw_scene(read_scene(edit_picture(_decoded(record), record["edit_instruction_en"]))))
        assert record["edit_instruction_en"].rstrip(".").split()[-1] in (scene.colour, scene.place)


def _decoded(record):
    import base64
    import io

    from PIL import Image

    return Image.open(io.BytesIO(base64.b64decode(record["src_img_b64"]))).convert("RGB")


@pytest.mark.parametrize(("edited", "score"), [(right, 10.0), (wrong, 5.0)])
def test_scores_are_those_that_are_known(pairs, tmp_path, edited, score):
    rows = run_both(pairs, tmp_path / "run", edited)
    assert [row.status for row in rows] == ["ok"] * 20
    assert {row.score for row in rows} == {score}


def test_failures_of_every_stage_are_statuses_and_in_no_mean(pairs, tmp_path):
    bad_edits = {pairs[2].instruction}
    judge = ShapesJudge({pairs[4].id: "I cannot say", pairs[5].id: '{"reasoning": "7 of', pairs[6].id: "score: 85"})

    def edited(image, instruction, seed):
        if instruction in bad_edits:
            raise RuntimeError("the editor is out of ideas")
        return edit_picture(image, instruction)

    rows = run_both(pairs, tmp_path / "run", edited, judge)
    failed = {row.id for row in rows if row.status == "edit_failed"}
    assert failed == {pair.id for pair in pairs if pair.instruction in bad_edits}
    judged = {row["id"] for row in read_rows(tmp_path / "run" / "scores")}
    assert judged == {pair.id for pair in pairs} - failed
    by_id = {row.id: row for row in rows}
    assert [by_id[pairs[i].id].status for i in (4, 5, 6)] == ["no_number", "cut", "out_of_scale"]
    found = summarise(rows)
    assert found["overall"]["mean"] == 10.0
    assert found["overall"]["valid"] == 20 - 3 - len(failed)


def test_editors_are_loaded_once_and_given_back_before_the_judge_comes_also_after_an_error(pairs, tmp_path):
    editor = ScriptedEditor(right)
    events = editor.loaded
    edit_all(pairs, [editor], tmp_path / "run", seed=0, how=HOW)

    def open_judge():
        events.append("judge")
        return ShapesJudge()

    judge_all_edits(pairs, open_judge, tmp_path / "run", JUDGING, HOW)
    assert events == ["load", "unload", "judge"]
    another = ScriptedEditor(right, name="another")
    with pytest.raises(RunError, match="another configuration"):
        edit_all(pairs, [another], tmp_path / "run", seed=0, how=HOW)
    again = ScriptedEditor(right)
    edit_all(pairs, [again], tmp_path / "run", seed=0, how=HOW)
    assert another.loaded == again.loaded == []  # refused, and nothing left to edit


class Leaving(ScriptedEditor):
    """Its first edit ends the run."""

    def edit(self, image, instruction, *, seed, name):
        raise KeyboardInterrupt


class Broken(ScriptedEditor):
    """It cannot be loaded."""

    def load(self):
        super().load()
        raise OSError("no such weights")


def test_editors_and_judges_are_given_back_also_after_an_error(pairs, tmp_path):
    leaving = Leaving(right)
    with pytest.raises(KeyboardInterrupt):
        edit_all(pairs, [leaving], tmp_path / "a", seed=0, how=HOW)
    broken = Broken(right)
    with pytest.raises(ConfigError, match="no such weights"):
        edit_all(pairs, [broken], tmp_path / "b", seed=0, how=HOW)
    assert leaving.loaded == broken.loaded == ["load", "unload"]
    closed = []

    class Raising(ShapesJudge):
        def judge(self, prepared):
            raise KeyboardInterrupt

        def close(self):
            closed.append(1)

    edit_all(pairs, [ScriptedEditor(right)], tmp_path / "c", seed=0, how=HOW)
    with pytest.raises(KeyboardInterrupt):
        judge_all_edits(pairs, lambda: [Raising(), Raising()], tmp_path / "c", JUDGING, HOW)
    assert closed == [1, 1]


def test_an_editor_that_has_lost_its_gpu_does_not_go_on_to_fail_every_other_pair(pairs, tmp_path):
    lost = []

    def losing(image, instruction, seed):
        if lost or seed == pair_seed(pairs[3], 0):
            lost.append(seed)
            raise RuntimeError("CUDA error: device-side assert triggered")
        return edit_picture(image, instruction)

    with pytest.raises(ConfigError, match="lost its GPU"):
        edit_all(pairs[:8], [ScriptedEditor(losing)], tmp_path / "run", seed=0, how=HOW)
    assert len(lost) == 1
    rows = run_both(pairs[:8], tmp_path / "run", right)
    assert [row.status for row in rows] == ["ok"] * 8


def test_a_second_call_edits_and_judges_nothing_again(pairs, tmp_path):
    calls = []

    def counted(image, instruction, seed):
        calls.append(instruction)
        return edit_picture(image, instruction)

    first = run_both(pairs, tmp_path / "run", counted)
    assert len(calls) == 20
    assert run_both(pairs, tmp_path / "run", counted) == first
    assert len(calls) == 20


def test_seeds_and_pictures_do_not_depend_on_the_number_of_editors(pairs, tmp_path):
    seen = {}
    lock = threading.Lock()

    def slow(image, instruction, seed):
        time.sleep(0.002)
        with lock:
            seen.setdefault(instruction, set()).add(seed)
        return edit_picture(image, instruction)

    rows = [run_both(pairs, tmp_path / str(number), slow, editors=number) for number in (1, 3)]
    assert rows[0] == rows[1]
    files = [sorted((tmp_path / str(n) / "pictures").rglob("*.png")) for n in (1, 3)]
    assert [f.read_bytes() for f in files[0]] == [f.read_bytes() for f in files[1]]
    assert len({pair_seed(pair, 0) for pair in pairs}) == 20


def test_a_folder_of_ready_pictures_is_judged_and_a_missing_one_is_a_failed_edit(pairs, tmp_path):
    for pair in pairs[1:]:
        path = tmp_path / "ready" / picture_name(pair)
        path.parent.mkdir(parents=True, exist_ok=True)
        draw_scene(read_scene(edit_picture(decode_image(pair), pair.instruction))).save(path)
    edit_all(pairs, [FolderEditor(tmp_path / "ready")], tmp_path / "run", seed=0, how=HOW)
    judge_all_edits(pairs, ShapesJudge, tmp_path / "run", JUDGING, HOW)
    rows = {row.id: row for row in read_results(pairs, tmp_path / "run")}
    assert rows[pairs[0].id].status == "edit_failed"
    assert {rows[pair.id].score for pair in pairs[1:]} == {10.0}


def test_the_source_is_shown_only_where_asked_for(pairs, tmp_path):
    seen = []

    class Looking(ShapesJudge):
        def judge(self, prepared):
            seen.extend(len(images) for _, images in prepared)
            return super().judge(prepared)

    alone = Judging(prompts=PROMPTS, compare_with_original=False, limits=Limits(cells=4096))
    run_both(pairs, tmp_path / "a", right, Looking(), alone)
    run_both(pairs, tmp_path / "b", right, Looking())
    assert (set(seen[:20]), set(seen[20:])) == ({1}, {2})


@pytest.mark.parametrize("name", ["../../etc/passwd", "a/b", "..", "x" * 300, "con\x00trol", ""])
def test_no_name_leads_out_of_the_folder(pairs, name):
    made = picture_name(replace(pairs[0], id=name))
    assert made.startswith("other/")
    assert made.count("/") == 1


def test_a_source_picture_belongs_to_its_content_and_never_to_a_name(pairs, tmp_path):
    other = decode_image(pairs[1])
    twin = replace(pairs[0], id=f"{pairs[0].id}.source", category=pairs[0].category)
    rows = run_both([pairs[0], twin], tmp_path / "run", lambda image, instruction, seed: other)
    alone = run_both([pairs[0]], tmp_path / "alone", lambda image, instruction, seed: other)
    assert rows[0].score == alone[0].score
    changed = replace(pairs[0], image=pairs[1].image, instruction=pairs[1].instruction)
    assert run_both([changed], tmp_path / "alone", right)[0].score == 10.0


def test_a_picture_that_is_not_the_one_that_was_edited_is_refused(pairs, tmp_path):
    run_both(pairs[:2], tmp_path / "run", right)
    again = replace(pairs[0], seed=5)  # its picture replaces the one of the first run
    run_both([again, pairs[1]], tmp_path / "run", wrong)
    with pytest.raises(RunError, match=f"picture of '{pairs[0].id}' is not the one"):
        run_both(pairs[:2], tmp_path / "run", right)
    (tmp_path / "run" / "pictures" / picture_name(pairs[1])).unlink()
    with pytest.raises(RunError, match="is gone"):
        run_both([again, pairs[1]], tmp_path / "run", wrong)


def test_a_score_of_an_earlier_edit_is_not_that_of_the_new_one(pairs, tmp_path):
    run_both(pairs[:1], tmp_path / "run", right)
    again = [replace(pairs[0], seed=5)]
    edit_all(again, [ScriptedEditor(wrong)], tmp_path / "run", seed=0, how=HOW)
    assert [row.status for row in read_results(again, tmp_path / "run")] == ["pending"]


def test_names_that_are_too_long_for_a_file_are_made_short(pairs, tmp_path):
    long = replace(pairs[0], id="图" * 80, category="类" * 60)
    (row,) = run_both([long], tmp_path / "run", right, judging=Judging(prompts={"类" * 60: PROMPTS["physical"]}))
    assert row.score == 10.0
