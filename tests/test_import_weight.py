"""What only names prompts, settings and stages does not wait for torch and transformers."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

import engine
import stages
from engine.models.registry import FAMILIES
from tests.support.import_graph import ROOT

HEAVY = ("torch", "transformers", "tokenizers", "xformers", "huggingface_hub")
# What runs no text: transformers' modelling, torch's compiler, and libraries for sound and video.
OF_MEDIA = ("scipy", "soundfile", "soxr", "av")
OF_OTHER_WORK = (
    "transformers.activations",
    "transformers.modeling_utils",
    "torch._dynamo",
    "torch.distributed.tensor",
    "sympy",
    *OF_MEDIA,
)
# What is installed on demand; make run does without.
OF_EXTRAS = (
    "ray",
    "matplotlib",
    "starlette",
    "uvicorn",
    "websockets",
    "prometheus_client",
    "opentelemetry",
)
LIGHT = {
    "a package": "import engine, stages, omni",
    "a prompt": "from engine import EngineConfig, SamplingParams, TokensPrompt; TokensPrompt((1,))",
    "help": "from omni.commands.cli import app; app(['--help'], standalone_mode=False)",
    "validate": (
        "from omni.commands.cli import app\n"
        "app(['validate', 'two_step'], standalone_mode=False)\n"
        "app(['validate', 'encode_then_generate'], standalone_mode=False)"
    ),
}


@pytest.mark.parametrize("case", LIGHT)
def test_light_work_imports_no_heavy_library(case: str) -> None:
    check = f"found = set({HEAVY + OF_EXTRAS}) & set(sys.modules)\nassert not found, found"
    code = f"import sys\n{LIGHT[case]}\n{check}"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)


def test_help_imports_nothing_that_pipelines_are_checked_with() -> None:
    code = (
        f"import sys\n{LIGHT['help']}\n"
        "found = {'pydantic', 'yaml', 'engine', 'stages', 'omni.pipelines'} & set(sys.modules)\n"
        "assert not found, found"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)


def test_a_server_answers_before_it_imports_a_heavy_library() -> None:
    code = (
        "import sys\nfrom omni.pipelines.pipeline_config import PipelineConfig\n"
        "from omni.server.http_server import HttpServer, bind\n"
        "from omni.server.serving.pipeline_server import PipelineServer\n"
        "from omni.server.serving.settings import ServerSettings\n"
        "settings = ServerSettings(port=0)\n"
        "server = PipelineServer([PipelineConfig.load('two_step')], settings)\n"
        "HttpServer(server, bind(settings)).listener.close()\n"
        f"found = set({HEAVY}) & set(sys.modules)\nassert not found, found"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_what_runs_text_imports_nothing_else(seeded: Callable[[str], str]) -> None:
    """Engines import no family before it is used; a talker nothing of its thinker's towers and its
    vocoder, which have processes of their own; and no command anything of other work."""
    for name in ("qwen2", "llama"):
        seeded(name)  # what builds them imports more
    talker = seeded("qwen2_5_omni")
    families = [f"engine.models.{row.module}" for row in FAMILIES.rows.values()]
    steps = {
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
    code = "import sys\n"
    for step, others in steps.items():
        code += f"{step}\nfound = set({others}) & set(sys.modules)\nassert not found, found\n"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize("package", [engine, stages])
def test_every_public_name_is_there_and_no_other(package: object) -> None:
    names = package.__all__  # type: ignore[attr-defined]
    assert dir(package) == sorted(names)
    assert all(getattr(package, name) is not None for name in names)
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        package.nonsense  # type: ignore[attr-defined]  # noqa: B018
