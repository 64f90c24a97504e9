"""Code that only names prompts, settings and stages imports neither torch nor transformers."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable
from types import ModuleType

import pytest

import engine
import omni
import stages
from engine.models.registry import FAMILIES
from tests.support.import_graph import ROOT, public_names

HEAVY = ("torch", "transformers", "tokenizers", "xformers", "huggingface_hub")
# Not needed to run text: transformers' modelling, torch's compiler, sound and video libraries.
OF_MEDIA = ("scipy", "soundfile", "soxr", "av")
OF_OTHER_WORK = (
    "transformers.activations",
    "transformers.modeling_utils",
    "torch._dynamo",
    "torch.distributed.tensor",
    "sympy",
    *OF_MEDIA,
)
# Installed on demand; make run does without.
OF_EXTRAS = (
    "ray",
    "matplotlib",
    "starlette",
    "uvicorn",
    "websockets",
    "prometheus_client",
    "opentelemetry",
)
CLI = "from omni.commands.cli import app\n"
OF_CHECKS = ("pydantic", "yaml", "engine", "stages", "omni.pipelines")
# Run in order in one process, with what none of them may have imported until then.
LIGHT: dict[str, Iterable[str]] = {
    f"{CLI}app(['--help'], standalone_mode=False)": (*HEAVY, *OF_EXTRAS, *OF_CHECKS),
    "import engine, stages, omni": HEAVY + OF_EXTRAS,
    "from engine import EngineConfig, SamplingParams, TokensPrompt; TokensPrompt((1,))": (
        HEAVY + OF_EXTRAS
    ),
    "from engine.models.registry import FAMILIES\nassert FAMILIES.architectures()": (
        HEAVY + OF_EXTRAS
    ),
    "for asked in ('schema', '--version', 'validate two_step'):\n"
    "    app(asked.split(), standalone_mode=False)": HEAVY + OF_EXTRAS,
    "app(['validate', 'encode_then_generate'], standalone_mode=False)": HEAVY + OF_EXTRAS,
    "try:\n    app(['bench', '--url', 'http://127.0.0.1:1'], standalone_mode=False)\n"
    "except SystemExit as end:\n    assert end.code == 2 and 'httpx2' in sys.modules": (
        *HEAVY,
        "starlette",
        "uvicorn",
        "matplotlib",
    ),
    "from omni.pipelines.pipeline_config import PipelineConfig\n"
    "from omni.server.http_server import HttpServer, bind\n"
    "from omni.server.serving.pipeline_server import PipelineServer\n"
    "from omni.server.serving.settings import ServerSettings\n"
    "settings = ServerSettings(port=0)\n"
    "server = PipelineServer([PipelineConfig.load('two_step')], settings)\n"
    "HttpServer(server, bind(settings)).listener.close()": HEAVY,
    "app(['list'], standalone_mode=False)": HEAVY[:3],
}


def run_and_find(steps: dict[str, Iterable[str]]) -> None:
    """Run code step by step in a new process; a step's modules must not be imported by then."""
    code = "import sys\n"
    for step, others in steps.items():
        code += (
            f"{step}\nfound = set({tuple(others)}) & set(sys.modules)\nassert not found, found\n"
        )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_light_work_imports_no_heavy_library() -> None:
    """Nor does a running server or a benchmark of one; help does not even check pipelines."""
    run_and_find(LIGHT)


def test_what_runs_text_imports_nothing_else(seeded: Callable[[str], str]) -> None:
    """Engines import no family before it is used; a talker nothing of its thinker's towers or its
    vocoder, which have separate processes; and no command the code of others."""
    for name in ("qwen2", "llama"):
        seeded(name)  # building them imports more
    talker = seeded("qwen2_5_omni")
    places = (row.build or row.generator or row.decoder_config for row in FAMILIES.rows.values())
    families = [f"engine.{place.partition(':')[0]}" for place in places if place is not None]
    steps: dict[str, Iterable[str]] = {
        "import engine.llm.llm_engine, engine.generator.generator_engine\n"
        "assert not [name for name in sys.modules if name.startswith('transformers.models.q')]": (
            families
        ),
        "from engine import EngineConfig, LLMEngine\n"
        f"LLMEngine(EngineConfig(model={talker!r}, part='talker'))": OF_OTHER_WORK,
        # Transformers' class of a Llama's config imports its activations, and torch's compiler.
        "from omni.commands.cli import app\n"
        "app(['run', 'two_step', '--prompt', 'Once'], standalone_mode=False)": OF_MEDIA + OF_EXTRAS,
    }
    run_and_find(steps)


@pytest.mark.parametrize("package", [engine, omni, stages])
def test_every_public_name_is_there(package: ModuleType) -> None:
    names = public_names(package)
    assert names and set(names) <= set(dir(package))
    assert all(getattr(package, name) is not None for name in names)
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        package.nonsense  # type: ignore[attr-defined]  # noqa: B018
