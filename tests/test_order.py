"""The map of the package, in reading order: a file may import only files that stand before it.

Files are read, not imported: a wrong import is then named here and does not crash as a circular import first.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import truebatch

ROOT = Path(truebatch.__file__).parent

ORDER = [
    "language.choosing",
    "language.translating",
    "language.saying",
    "language.helping",
    "interruption",
    "errors",
    "gpus",
    "notebook",
    "textfiles",
    "settingrules",
    "yamlfiles",
    "config",
    "targets",
    "planning.rows",
    "planning.datafiles",
    "planning.lengths",
    "planning.tokenizerfiles",
    "planning.textcounts",
    "planning.arrayfiles",
    "planning.measured",
    "planning.measuring",
    "planning.imagesizes",
    "planning.packing_loops",
    "planning.cutting_loops",
    "planning.kernels",
    "planning.compiled",
    "planning.distributions",
    "planning.keyed",
    "planning.segments",
    "planning.settings",
    "planning.samples",
    "planning.resources",
    "planning.dealing",
    "planning.cutting",
    "planning.forming",
    "planning.splitting",
    "planning.statistics",
    "planning.plan",
    "planning.files",
    "planning.stream",
    "tensors.causal",
    "tensors.compiling",
    "tensors.chunkedloss",
    "tensors.field",
    "tensors.handover",
    "tensors.kernels",
    "tensors.scores",
    "tensors.segments",
    "tensors.together",
    "tensors.microbatch",
    "tensors.operators",
    "tensors.noise",
    "tensors.values",
    "tensors.collating",
    "tensors.splitting",
    "tensors.reading",
    "tensors.cudnnplans",
    "tensors.fixedtable",
    "tensors.hosttable",
    "tensors.shortsamples",
    "tensors.planned",
    "tensors.sending",
    "tensors.varlen",
    "tensors.attention",
    "tensors.worker",
    "tensors.watch",
    "tensors.loader",
    "tensors.dataloader",
    "objective",
    "generation.settings",
    "generation.prompts",
    "generation.sampling",
    "generation.endings",
    "generation.beams",
    "generation.decoding",
    "generation.texts",
    "system",
    "systems.finding",
    "hf.blockmask",
    "hf.templates",
    "hf.modelfiles",
    "hf.loading",
    "training.outofmemory",
    "hf.outputlayer",
    "hf.losses",
    "hf.runs",
    "hf.refusing",
    "hf.attention",
    "hf.rowrotary",
    "hf.inputs",
    "hf.images",
    "hf.kinds",
    "hf.heads",
    "hf.limits",
    "hf.objectives",
    "hf.sizes",
    "hf.exceptions",
    "hf.samples",
    "hf.shrinking",
    "hf.tiny",
    "hf.shapes",
    "training.schedules",
    "training.settings",
    "training.systemsettings",
    "training.law",
    "proof.arrangements",
    "proof.settings",
    "proof.gradients",
    "proof.outputs",
    "proof.owncells",
    "proof.subjects",
    "proof.comparing",
    "proof.functions",
    "proof.generating",
    "proof.probes",
    "proof.quiet",
    "proof.hfsubject",
    "proof.sizes",
    "proof.tracing",
    "proof.report",
    "proof.results",
    "proof.causes",
    "proof.explanation",
    "proof.proving",
    "proof.layouts",
    "hf.modelfolders",
    "proof.rounding",
    "proof.counterparts",
    "proof.parting",
    "proof.againstreport",
    "proof.against",
    "proof.server_logprobs",
    "proof.againstserver",
    "proof.engines",
    "proof.verification",
    "proof.asking",
    "hf.finetuning.settings",
    "hf.finetuning.records",
    "hf.finetuning.chats",
    "hf.finetuning.labels",
    "hf.finetuning.encoded",
    "hf.finetuning.encoding",
    "hf.finetuning.models",
    "hf.closeness",
    "hf.growingcache",
    "hf.rowattention",
    "hf.replaying",
    "hf.decoding",
    "hf.prefixes",
    "hf.towerattention",
    "hf.imagefeatures",
    "hf.rowinputs",
    "hf.packedreading",
    "hf.finetuning.adapters",
    "hf.finetuning.system",
    "training.failpoints",
    "training.durable",
    "training.nested",
    "training.tensorfiles",
    "training.manifests",
    "training.keeping",
    "training.checkpoints",
    "training.sharding",
    "training.states",
    "training.metrics",
    "training.runs",
    "training.signals",
    "training.watchdog",
    "training.adding",
    "training.reducing",
    "training.optimising",
    "training.guard",
    "training.quarantine",
    "training.updating",
    "training.attending",
    "training.step",
    "training.checking",
    "training.evaluating",
    "training.progress",
    "training.opening",
    "training.place",
    "training.task",
    "training.saving",
    "training.watching",
    "training.job",
    "training.nonfinite",
    "training.afterwards",
    "training.loop",
    "training.trackers",
    "training.launching",
    "training.memory",
    "training.memoryfit",
    "training.budget",
    "training.estimating",
    "training.fitting",
    "training.starting",
    "training.practice",
    "training.drill",
    "training.memorydrill",
    "training.trained",
    "training.sizing",
    "training.foreseeing",
    "scoring.records",
    "scoring.keys",
    "scoring.checksums",
    "scoring.collection",
    "scoring.journal",
    "scoring.manifest",
    "scoring.labels",
    "scoring.backend",
    "scoring.faults",
    "scoring.reading",
    "scoring.listing",
    "scoring.windows",
    "scoring.streaming",
    "scoring.shapes",
    "scoring.batching",
    "scoring.remaining",
    "scoring.following",
    "scoring.ahead",
    "scoring.running",
    "scoring.exporting",
    "scoring.pictures",
    "scoring.scripted",
    "scoring.pinned",
    "scoring.readouts",
    "scoring.prompting",
    "scoring.inprocess",
    "scoring.budget",
    "scoring.opening",
    "scoring.checking",
    "scoring.functions",
    "scoring.scorer",
    "scoring.wire",
    "scoring.worker",
    "scoring.addresses",
    "scoring.httpclient",
    "scoring.inflight",
    "scoring.chatanswers",
    "scoring.httpbackend",
    "scoring.calling",
    "scoring.stated",
    "scoring.workerprocess",
    "scoring.raybackend",
    "scoring.rayengine",
    "adapters.singles",
    "adapters.deepspeed",
    "adapters.planned",
    "adapters.refusals",
    "adapters.steploss",
    "adapters.trainer",
    "adapters.dataloader",
    "adapters.lightning",
    "reports.tables",
    "reports.charts",
    "reports.pictures",
    "reports.page",
    "reports.galleries",
    "reports.findings",
    "reports.proofs",
    "reports.fits",
    "reports.plans",
    "reports.lengths",
    "reports.scores",
    "reports.runsections",
    "reports.report",
    "reports.showing",
    "systems.chinese_gpt.characters",
    "systems.chinese_gpt.dictionary",
    "systems.chinese_gpt.segmenting",
    "systems.chinese_gpt.vocabulary",
    "systems.chinese_gpt.model",
    "systems.chinese_gpt.settings",
    "systems.chinese_gpt.corpus",
    "systems.chinese_gpt.dialogues",
    "systems.chinese_gpt.samples",
    "systems.chinese_gpt.objective",
    "systems.chinese_gpt.advice",
    "systems.chinese_gpt.facts",
    "systems.chinese_gpt.generator",
    "systems.chinese_gpt.idioms",
    "systems.chinese_gpt.linting",
    "systems.chinese_gpt.preparing",
    "systems.chinese_gpt.generating",
    "systems.chinese_gpt.exporting",
    "systems.chinese_gpt.ngrams",
    "systems.chinese_gpt.evaluation",
    "systems.chinese_gpt.timing",
    "systems.chinese_gpt.system",
    "systems.chinese_gpt.batchloader",
    "systems.chinese_gpt.compat",
    "democuts",
    "demo",
    "systems.seqset_vae.settings",
    "systems.seqset_vae.stays",
    "systems.seqset_vae.sets",
    "systems.seqset_vae.autoencoder",
    "systems.seqset_vae.heads",
    "systems.seqset_vae.inputs",
    "systems.seqset_vae.model",
    "systems.seqset_vae.losses",
    "systems.seqset_vae.objective",
    "systems.seqset_vae.collapse",
    "systems.seqset_vae.beside",
    "systems.seqset_vae.weights",
    "systems.seqset_vae.faults",
    "systems.seqset_vae.variables",
    "systems.seqset_vae.tables",
    "systems.seqset_vae.repairing",
    "systems.seqset_vae.cutting",
    "systems.seqset_vae.carrying",
    "systems.seqset_vae.generating",
    "systems.seqset_vae.labels",
    "systems.seqset_vae.nafld",
    "systems.seqset_vae.sources",
    "systems.seqset_vae.keeping",
    "systems.seqset_vae.loading",
    "systems.seqset_vae.validating",
    "systems.seqset_vae.preparing",
    "systems.seqset_vae.metrics",
    "systems.seqset_vae.predicting",
    "systems.seqset_vae.evaluating",
    "systems.seqset_vae.system",
    "systems.seqset_vae.compat",
    "systems.seqset_vae.trying",
    "systems.stitched_llm.donors",
    "systems.stitched_llm.adapters",
    "systems.stitched_llm.configuration",
    "systems.stitched_llm.caching",
    "systems.stitched_llm.model",
    "systems.stitched_llm.layers",
    "systems.stitched_llm.selftest",
    "systems.stitched_llm.leastsquares",
    "systems.stitched_llm.vocabularies",
    "systems.stitched_llm.stitching",
    "systems.stitched_llm.corpus",
    "systems.stitched_llm.embedded",
    "systems.stitched_llm.settings",
    "systems.stitched_llm.data",
    "systems.stitched_llm.parts",
    "systems.stitched_llm.building",
    "systems.stitched_llm.saving",
    "systems.stitched_llm.evaluating",
    "systems.stitched_llm.searching",
    "systems.stitched_llm.system",
    "systems.stitched_llm.trainer",
    "systems.stitched_llm.compat",
    "systems.vlm_pruning.settings",
    "systems.vlm_pruning.answers",
    "systems.vlm_pruning.judges",
    "systems.vlm_pruning.records",
    "systems.vlm_pruning.shapes",
    "systems.vlm_pruning.categories",
    "systems.vlm_pruning.datasets",
    "systems.vlm_pruning.figures",
    "systems.vlm_pruning.images",
    "systems.vlm_pruning.sizing",
    "systems.vlm_pruning.vision",
    "systems.vlm_pruning.patches",
    "systems.vlm_pruning.tiles",
    "systems.vlm_pruning.grids",
    "systems.vlm_pruning.tiny",
    "systems.vlm_pruning.fullsize",
    "systems.vlm_pruning.families",
    "systems.vlm_pruning.encoding",
    "systems.vlm_pruning.places",
    "systems.vlm_pruning.choosing",
    "systems.vlm_pruning.modules",
    "systems.vlm_pruning.mergers",
    "systems.vlm_pruning.backbones",
    "systems.vlm_pruning.stream",
    "systems.vlm_pruning.masking",
    "systems.vlm_pruning.model",
    "systems.vlm_pruning.generation",
    "systems.vlm_pruning.accounting",
    "systems.vlm_pruning.asking",
    "systems.vlm_pruning.baselines",
    "systems.vlm_pruning.evaluation",
    "systems.vlm_pruning.showing",
    "systems.vlm_pruning.schedules",
    "systems.vlm_pruning.pooling",
    "systems.vlm_pruning.objective",
    "systems.vlm_pruning.optimisers",
    "systems.vlm_pruning.measuring",
    "systems.vlm_pruning.beside",
    "systems.vlm_pruning.system",
    "systems.vlm_pruning.compat",
    "systems.vlm_pruning.pretraining",
    "systems.vl_reward.parsing",
    "systems.vl_reward.statistics",
    "systems.vl_reward.benchmark",
    "systems.vl_reward.prompts",
    "systems.vl_reward.editors",
    "systems.vl_reward.lines",
    "systems.vl_reward.stages",
    "systems.vl_reward.shapes",
    "systems.vl_reward.settings",
    "systems.vl_reward.tinyjudge",
    "systems.vl_reward.judges",
    "systems.vl_reward.judgeprocess",
    "systems.vl_reward.reporting",
    "systems.vl_reward.comparing",
    "systems.vl_reward.running",
    "systems.vl_reward.compat",
    "environment",
    "checkup",
    "bench.choosing",
    "bench.commandline",
    "bench.keeping",
    "bench.processes",
    "bench.progress",
    "bench.independent",
    "bench.census_worker",
    "bench.census_journal",
    "bench.census_tables",
    "bench.census",
    "bench.training_work",
    "bench.training_ways",
    "bench.training_titan",
    "bench.training_peers",
    "bench.training_settings",
    "bench.training_timing",
    "bench.training_measuring",
    "bench.training_attention",
    "bench.training_table",
    "bench.training",
    "bench.stitched_llm_work",
    "bench.stitched_llm",
    "bench.chinese_gpt",
    "bench.nafld",
    "bench.seqset_quality",
    "bench.seqset_vae_ways",
    "bench.seqset_vae",
    "bench.vlm_pruning_work",
    "bench.vlm_pruning_rows",
    "bench.vlm_pruning_generation",
    "bench.vlm_pruning",
    "bench.vlm_pruning_quality",
    "bench.vlm_pruning_sizes",
    "bench.vlm_pruning_choices",
    "bench.vlm_pruning_parts",
    "bench.scripts",
    "bench.note_tables",
    "bench.figures",
    "bench.tables",
    "bench.scoring_work",
    "bench.scoring",
    "bench.scoring_real",
    "bench.vl_reward_work",
    "bench.vl_reward",
    "commands.bench",
    "commands.chinese_gpt",
    "commands.datasets",
    "commands.demo",
    "commands.doctor",
    "commands.env",
    "commands.folders",
    "commands.evaluate",
    "commands.show",
    "commands.generate",
    "commands.init",
    "commands.plan",
    "commands.report",
    "commands.seqset_vae",
    "commands.stitched_llm",
    "commands.settings",
    "commands.config",
    "commands.vl_reward",
    "commands.score",
    "commands.run",
    "commands.train",
    "commands.fit",
    "commands.verify",
    "commands.vlm_pruning",
    "cli",
    "__main__",
]
"""A new file goes after everything it imports. `__init__` files hold no imports of their own rooms."""

PLANNING_MAY_IMPORT = {"numpy", "numba", "pyarrow", "PIL", "safetensors", "tokenizers"}
PLANNING_MAY_USE = ("truebatch.planning.", "truebatch.errors", "truebatch.notebook", "truebatch.textfiles")
ONLY_IN = {
    "pydantic": ("config",),
    "pydantic_core": ("config",),
    "typer": ("cli", "commands."),
    "transformers": ("hf.", "adapters.", "scoring.", "systems.", "bench."),
    "accelerate": ("training.",),
}
NEVER_FILES = {"utils", "common", "helpers", "base", "core", "manager", "misc"}


@cache
def modules() -> dict[str, Path]:
    """Every file of the package by its dotted name, room markers left out."""
    files = [file for file in ROOT.rglob("*.py") if file.name != "__init__.py"]
    return {".".join(file.relative_to(ROOT).with_suffix("").parts): file for file in files}


@cache
def imports(file: Path) -> list[tuple[str, bool]]:
    """Each imported module and whether the import stands inside a function."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    inside = {id(n) for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) for n in ast.walk(f)}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, id(node) in inside) for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative imports hide the order"
            found += [(name, id(node) in inside) for name in _named(node)]
    return found


def _named(node: ast.ImportFrom) -> list[str]:
    # `from truebatch.planning import kernels` imports a file; `from truebatch.errors import DataError` a name of one.
    module = node.module or ""
    files = [f"{module}.{alias.name}" for alias in node.names]
    known = {f"truebatch.{name}" for name in modules()}
    return [name if name in known else module for name in files]


def own_imports(file: Path) -> list[str]:
    own = [name.removeprefix("truebatch.") for name, _ in imports(file) if name.startswith("truebatch.")]
    return [name for name in own if not (ROOT / name.replace(".", "/")).is_dir()]


def test_every_file_stands_in_the_order_once():
    assert sorted(ORDER) == sorted(modules())


def test_no_file_imports_a_later_one():
    place = {name: i for i, name in enumerate(ORDER)}
    upward = [
        f"{name} -> {imported}"
        for name, file in modules().items()
        for imported in own_imports(file)
        if place.get(imported, len(place)) >= place.get(name, len(place))
    ]
    assert not upward


def test_planning_imports_numpy_and_never_torch():
    import sys

    foreign = [
        f"{name} -> {imported}"
        for name, file in modules().items()
        if name.startswith("planning.")
        for imported, _ in imports(file)
        if (top := imported.partition(".")[0]) not in PLANNING_MAY_IMPORT | set(sys.stdlib_module_names) | {"truebatch"}
        or (top == "truebatch" and not imported.startswith(PLANNING_MAY_USE))
    ]
    assert not foreign


def test_some_packages_are_imported_in_one_place_only():
    wrong = [
        f"{name} -> {imported}"
        for name, file in modules().items()
        for imported, _ in imports(file)
        if not name.startswith(ONLY_IN.get(imported.partition(".")[0], ("",)))
    ]
    assert not wrong


def test_only_commands_import_their_own_package_inside_functions():
    late = [
        f"{name} -> {imported}"
        for name, file in modules().items()
        if not name.startswith("commands.")
        for imported, is_inside in imports(file)
        if is_inside and imported.startswith("truebatch")
    ]
    assert not late


def test_files_are_named_for_what_they_hold_and_stay_readable():
    assert not NEVER_FILES & {name.rpartition(".")[2] for name in ORDER}
    long = {name: n for name, file in modules().items() if (n := len(file.read_text().splitlines())) > 400}
    assert not long


def length_of(name: str, node: ast.FunctionDef) -> int:
    """Lines of a function; of a command without its options, which are a list and not code."""
    first = node.body[0].lineno if name.startswith("commands.") else node.lineno
    return (node.end_lineno or 0) - first + 1


def test_no_function_is_longer_than_a_page():
    long = [
        f"{name}.{node.name}: {length} lines"
        for name, file in modules().items()
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and (length := length_of(name, node)) > 60
    ]
    assert not long
