"""The page needs nothing from elsewhere, and does in a real browser what it shows."""

from __future__ import annotations

import io
import json
import re
import urllib.request
from base64 import b64decode, b64encode
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

import openai
import pytest
import soundfile

from omni.pipelines.pipeline_config import PipelineConfig
from tests.support.browser import CHROMIUM, Browser
from tests.support.encoder_decoder_requests import SAMPLING_RATE, tone
from tests.support.live_server import LiveServer
from tests.support.videos import moving_picture, video_file

PAGE = (resources.files("omni.server") / "page.html").read_text("utf-8")
FIELD = r"<(?:input|select|textarea)[^>]*"
NAMES = "[...document.querySelectorAll('#attached span')].map((each) => each.textContent)"
"""An expression: the names of the files that are attached."""
NO_BROWSER = "the program chromium is not installed (Debian's package of that name)"


@pytest.fixture(scope="module")
def running(checkpoint_cache: object) -> Iterator[LiveServer]:
    with LiveServer(["omni_speech", "two_step"]) as server:
        yield server


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("browser")) as browser:
        yield browser


def test_the_page_fetches_nothing_from_elsewhere(running: LiveServer):
    elsewhere = r"""(?:src|href)\s*=\s*["'](?!data:)|https?://|@import|url\((?!#)"""
    assert not re.findall(elsewhere, PAGE)
    with urllib.request.urlopen(f"{running.url}/") as answer:
        assert answer.read().decode() == PAGE
        policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy and "frame-ancestors 'none'" in policy


def test_every_field_of_the_page_has_a_name():
    fields = re.findall(rf"{FIELD}\bid=\"(\w+)\"", PAGE)
    named = {*re.findall(r"<label for=\"(\w+)\"", PAGE)}
    named |= {
        each for label in re.findall(r"<label\b(?! for=)[^>]*>.*?</label>", PAGE, re.S)
        for each in re.findall(rf"{FIELD}\bid=\"(\w+)\"", label)
    }  # fmt: skip
    assert len(fields) > 8 and set(fields) == named


def test_figures_are_those_of_the_stages(running: LiveServer):
    with urllib.request.urlopen(f"{running.url}/v1/pipelines") as answer:
        reported = json.loads(answer.read())
    assert reported["status"] == "ready"
    assert [each["name"] for each in reported["data"]] == ["omni_speech", "two_step"]
    for pipeline in reported["data"]:
        stats = running.omni(pipeline["name"]).stats()
        assert [each["name"] for each in pipeline["stages"]] == list(stats)
        for stage in pipeline["stages"]:
            assert stage["stats"]["num_steps"] == stats[stage["name"]].num_steps
    talker = reported["data"][0]["stages"][1]
    assert talker["inputs"] == ["thinker"] and talker["kind"] == "autoregressive"


def test_where_the_time_of_requests_went_is_told(running: LiveServer):
    with running.client() as client:
        client.completions.create(model="two_step", prompt="Once upon a time", max_tokens=5)
        with pytest.raises(openai.BadRequestError):
            client.completions.create(model="two_step", prompt=[[10**6]])
    with urllib.request.urlopen(f"{running.url}/v1/pipelines/two_step/requests") as answer:
        refused, done, *_ = json.loads(answer.read())["data"]
    assert (refused["status"], done["status"]) == ("refused", "ok")
    assert refused["first_token"] is None and refused["stages"] == []
    writer, reader = done["stages"]
    assert (writer["name"], reader["name"]) == ("writer", "reader")
    assert 0 <= done["turn"] <= writer["entered"] < writer["left"] <= reader["entered"]
    assert reader["left"] <= done["seconds"]
    assert (reader["tokens"], writer["is_whole"], reader["is_whole"]) == (5, True, True)
    assert writer["entered"] + writer["first_token"] <= writer["left"]


def test_who_has_another_key_sees_nothing_of_a_request(checkpoint_cache: object):
    with LiveServer(["two_step"], api_keys=["one", "other"]) as server:
        server.client("one").completions.create(model="two_step", prompt="Hello", max_tokens=2)
        seen = {}
        for key in ("one", "other"):
            request = urllib.request.Request(
                f"{server.url}/v1/pipelines/two_step/requests",
                headers={"Authorization": f"Bearer {key}"},
            )
            with urllib.request.urlopen(request) as answer:
                seen[key] = len(json.loads(answer.read())["data"])
    assert seen == {"one": 1, "other": 0}


@pytest.mark.skipif(CHROMIUM is None, reason=NO_BROWSER)
def test_a_request_is_opened_by_the_keyboard(running: LiveServer, browser: Browser):
    with running.client() as client:
        client.completions.create(model="two_step", prompt="Once upon a time", max_tokens=5)
    page = browser.open(running.url)
    page.wait_for("document.querySelectorAll('#model option').length == 2")
    page.run("$('model').value = 'two_step'; $('model').dispatchEvent(new Event('change')); 0")
    page.wait_for("document.querySelectorAll('#requests details').length > 0")
    page.run("document.querySelector('#requests summary').focus(); 0")
    page.press("\r", "Enter", 13)
    page.wait_for("document.querySelectorAll('#requests table').length == 1")
    lanes = page.run(
        "[...document.querySelectorAll('#requests .lane')].map(each => each.ariaLabel)"
    )
    assert lanes[1].startswith("writer: from ") and "5 out" in lanes[2]
    shown = "getComputedStyle(document.body).backgroundColor"
    colours = []
    for scheme in ("light", "dark"):
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        page.send("Emulation.setEmulatedMedia", features=features)
        colours.append(page.run(shown))
    assert colours[0] == "rgb(255, 255, 255)" and colours[1] != colours[0]
    assert page.problems == []


@pytest.mark.skipif(CHROMIUM is None, reason=NO_BROWSER)
def test_a_browser_hears_and_is_heard(running: LiveServer, browser: Browser):
    sound = io.BytesIO()
    soundfile.write(sound, tone(0.5), SAMPLING_RATE, format="WAV")
    data = b64encode(sound.getvalue()).decode()
    page = browser.open(running.url)
    page.wait_for("document.querySelectorAll('.stage').length == 3")
    page.run(
        f"attach([new File([Uint8Array.from(atob('{data}'), (each) => each.charCodeAt(0))], "
        "'question.wav', {type: 'audio/wav'})])"
    )
    assert page.run(NAMES) == ["question.wav"]
    page.run("$('text').value = 'What <b>was</b> that?'; $('speak').checked = true;")
    page.run("$('tokens').value = '12'; $('form').requestSubmit(); 0")
    page.wait_for("!abort && document.querySelectorAll('#log audio').length == 2")
    said = page.run("$('log').innerText")
    assert "What <b>was</b> that?" in said and "12 out" in said
    assert page.run("messages.length") == 2 and page.run("messages[1].content.length") > 0
    pairs = "[...document.querySelector('.stage dl').children]"
    texts = "(each) => [...each.children].map((part) => part.textContent)"
    figures = f"Object.fromEntries({pairs}.map({texts}))"
    page.wait_for(f"Number({figures}['tokens out']) >= 12")
    assert "preempted" not in page.run(figures), "only what is not zero is shown"

    page.wait_for("document.querySelectorAll('#requests details').length == 1")
    page.run("document.querySelector('#requests summary').click(); 0")
    page.wait_for("document.querySelectorAll('#requests .lane').length == 4")
    opened = page.run("document.querySelector('#requests details').innerText")
    assert "ok" in opened and "first sound after" in opened and "12 out" in opened
    for name in ("waiting for its turn", "thinker", "talker", "code2wav"):
        assert name in opened
    memory = page.run("document.querySelector('.stage .bar').getAttribute('aria-label')")
    assert re.match(r"memory: full attention: \d+ blocks cached; rows of items: ", memory)

    page.run("$('speak').checked = false; $('tokens').value = '1500'; $('seed').value = '1';")
    page.run("$('text').value = 'All of it.'; $('form').requestSubmit(); 0")
    page.wait_for("messages.length == 3 && $('log').lastChild.innerText.length > 30")
    page.run("$('stop').click(); 0")
    page.wait_for("!abort && messages.length == 4")
    running.check_nothing_is_left()

    page.run("$('model').value = 'two_step'; $('model').dispatchEvent(new Event('change')); 0")
    page.wait_for("document.querySelectorAll('.stage').length == 2")
    page.run("$('speak').click(); 0")
    assert page.run("[$('speak').disabled, $('speak').checked]") == [True, False]
    page.run("$('tokens').value = '4'; $('text').value = 'x'; $('form').requestSubmit(); 0")
    page.wait_for("!abort && messages.length == 2")
    assert page.problems == []


@pytest.mark.skipif(CHROMIUM is None, reason=NO_BROWSER)
def test_sound_is_stopped_by_its_button_and_by_speaking(running: LiveServer, browser: Browser):
    page = browser.open(running.url)
    page.wait_for("document.querySelectorAll('.stage').length == 3")
    visible = "['send', 'stop'].filter((each) => !$(each).hidden)"
    sounds = (
        "speaker = new Speaker(); speaker.play(btoa('\\0'.repeat(480000)), 24000);"
        "speaker.end(); answering(); window.heard = speaker.context; 0"
    )
    for stops in ("$('stop').click()", "record()", "restart()"):
        page.run(sounds)
        assert page.run(visible) == ["send", "stop"], "the next question need not wait"
        page.run(f"{stops}; 0")
        assert page.run("[speaker, window.heard.state]") == [None, "closed"]
        assert page.run(visible) == ["send"]
    short = "speaker = new Speaker(); speaker.play(btoa('\\0'.repeat(480)), 24000); speaker.end()"
    page.run(f"{short}; 0")
    page.wait_for("speaker === null")

    page.run("$('text').value = 'Never mind.'; $('form').requestSubmit(); hush(); 0")
    page.wait_for("!abort")
    assert page.run("messages.length") == 0, "a question without an answer is not kept"
    page.run("$('tokens').value = '-3'; $('text').value = 'x'; $('form').requestSubmit(); 0")
    page.wait_for("!abort && document.querySelectorAll('#log .error').length == 1")
    assert page.run("messages.length") == 0
    running.check_nothing_is_left()


@pytest.fixture(scope="module")
def several(checkpoint_cache: object) -> Iterator[LiveServer]:
    """Of all kinds: only the last one chats."""
    stages = {
        "hearing": {"kind": "autoregressive", "model": "seeded:whisper", "final_output": "text"},
        "embedding": {"kind": "encoder", "model": "seeded:bert", "final_output": "tensors"},
    }
    alone = [
        PipelineConfig.model_validate({"name": name, "stages": {"only": stage}})
        for name, stage in stages.items()
    ]
    with LiveServer([*alone, "encode_then_generate", "omni_speech"]) as server:
        yield server


def choose(page: Browser, pipeline: str) -> list[str]:
    """Choose a pipeline; which fields can be used then."""
    page.run(f"$('model').value = '{pipeline}'; $('model').dispatchEvent(new Event('change')); 0")
    fields = "['text', 'send', 'mic', 'file', 'speak', 'voices', 'tokens']"
    usable: list[str] = page.run(f"{fields}.filter((each) => !$(each).disabled)")
    return usable


@pytest.mark.skipif(CHROMIUM is None, reason=NO_BROWSER)
def test_only_what_a_pipeline_can_do_is_offered(several: LiveServer, browser: Browser):
    page = browser.open(several.url)
    page.wait_for("document.querySelectorAll('#voices input').length")
    assert page.run("$('model').value") == "omni_speech", "the first that chats"
    usable = ["text", "send", "mic", "file", "speak", "voices", "tokens"]
    assert choose(page, "omni_speech") == usable
    voices = page.run("[...document.querySelectorAll('#voices input')].map((each) => each.value)")
    assert voices == ["", *several.omni("omni_speech").pipeline.voices.own]
    page.run(f"document.querySelector('#voices [value={voices[1]}]').click(); 0")
    page.run("$('speak').checked = true; 0")
    assert page.run("question().audio.voice") == voices[1]
    assert page.run("$('file').accept") == "image/*,audio/*,video/*"
    for name, reported in (
        ("hearing", "it reads audio and gives text"),
        ("embedding", "it reads text and gives tensors"),
        ("encode_then_generate", "it reads text and gives"),
    ):
        assert choose(page, name) == []
        said = page.run("$('cannot').textContent")
        assert said.startswith(f"{name} does not chat: ") and reported in said
    assert page.run("$('speak').checked") is False
    assert choose(page, "omni_speech") == usable
    assert page.run("$('cannot').textContent") == ""
    assert page.problems == []


@pytest.mark.skipif(CHROMIUM is None, reason=NO_BROWSER)
def test_an_empty_conversation_offers_things_to_try(several: LiveServer, browser: Browser):
    titles = "[...document.querySelectorAll('#ideas b')].map((each) => each.textContent)"
    page = browser.open(several.url)
    page.wait_for("document.querySelectorAll('#ideas button').length == 3")
    assert page.run(titles) == ["Hear it speak", "Ask by voice", "Show a picture"]
    assert page.run("$('locked').hidden"), "no key is wanted"
    page.run("$('tokens').value = '4'; document.querySelector('#ideas button').click(); 0")
    page.wait_for("!abort && messages.length == 2")
    assert page.run("[$('speak').checked, $('empty').hidden]") == [True, True]
    page.run("$('clear').click(); 0")
    assert page.run("[messages.length, $('empty').hidden, $('log').children.length]") == [
        0, False, 0,
    ]  # fmt: skip
    choose(page, "hearing")
    assert page.run(titles) == []
    assert page.run("$('command').textContent").startswith("curl http://127.0.0.1:")
    assert "/v1/audio/transcriptions" in page.run("$('command').textContent")
    assert page.problems == []


@pytest.mark.skipif(CHROMIUM is None, reason=NO_BROWSER)
def test_settings_open_and_close_by_the_keyboard(several: LiveServer, browser: Browser):
    page = browser.open(several.url)
    page.wait_for("document.querySelectorAll('#voices input').length")
    page.run("$('set').focus(); 0")
    page.press("\r", "Enter", 13)
    page.wait_for("$('settings').open")
    page.press("\x1b", "Escape", 27)
    page.wait_for("!$('settings').open && document.activeElement == $('set')")
    page.run("$('system').value = 'Be brief.'; messages = [{role: 'user', content: 'x'}]; 0")
    assert page.run("question().messages.map((each) => each.role)") == ["system", "user"]
    edges = page.run("document.querySelectorAll('#edges > path').length")
    assert edges == 3, "from the request to the thinker, the talker and the vocoder"
    assert page.problems == []


@pytest.mark.skipif(CHROMIUM is None, reason=NO_BROWSER)
def test_a_key_is_asked_for_where_one_is_wanted(checkpoint_cache: object, browser: Browser):
    with LiveServer(["two_step"], api_keys=["one"]) as server:
        page = browser.open(server.url)
        page.wait_for("document.querySelectorAll('#locked:not([hidden])').length")
        page.run("$('key').value = 'one'; $('key').dispatchEvent(new Event('change')); 0")
        page.wait_for("document.querySelectorAll('.stage').length == 2")
        page.wait_for("$('status').textContent == 'ready'")


@pytest.mark.skipif(CHROMIUM is None, reason=NO_BROWSER)
def test_a_video_is_shown_and_sent_as_one(several: LiveServer, browser: Browser):
    data = b64encode(video_file("webm", moving_picture(8))).decode()
    attach = (
        f"attach([new File([Uint8Array.from(atob('{data}'), (each) => each.charCodeAt(0))], "
        "'clip.webm', {type: 'video/webm'})])"
    )
    page = browser.open(several.url)
    page.wait_for("document.querySelectorAll('#voices input').length")
    page.run(attach)
    page.run("$('text').value = 'What?'; $('tokens').value = '4'; $('form').requestSubmit(); 0")
    page.wait_for("!abort && messages.length == 2")
    assert page.run("messages[0].content[0].type") == "video_url"
    assert page.run("document.querySelectorAll('#log video').length") == 1
    assert page.run("document.querySelectorAll('#log audio, #log .error').length") == 0
    choose(page, "hearing")
    page.run(attach)
    complaint = page.run("document.querySelector('#log .error .bubble').textContent")
    assert complaint == "clip.webm cannot be read: hearing does not read videos"
    assert page.run(NAMES) == []
    assert page.problems == []


@pytest.mark.skipif(CHROMIUM is None, reason=NO_BROWSER)
def test_the_list_of_last_requests_stands_still(running: LiveServer, browser: Browser):
    client = running.client()

    def ask() -> None:
        client.completions.create(model="two_step", prompt="Hello", max_tokens=1)

    for _ in range(31):  # one more than are shown
        ask()
    page = browser.open(running.url)
    page.wait_for("document.querySelectorAll('#voices input').length")
    choose(page, "two_step")
    page.wait_for("document.querySelectorAll('#requests details').length == 30")
    page.run("document.querySelector('#requests summary').focus(); 0")
    listed = "[...document.querySelectorAll('#requests details')].map((each) => each.dataset.id)"
    before = page.run(listed)
    page.run(
        "window.changes = []; new MutationObserver((seen) => changes.push(...seen))"
        ".observe($('requests'), { childList: true, subtree: true }); 0"
    )
    for _ in range(3):
        page.run("look()")
    assert page.run("changes.length") == 0 and page.run(listed) == before
    ask()
    page.wait_for("changes.length")
    page.run("look()")
    assert page.run(listed)[1:] == before[:-1]
    assert page.run("changes.length") == 2, "one is added, one removed"
    assert page.run("document.activeElement.parentElement.dataset.id") == before[0]
    assert page.problems == []


@pytest.mark.skipif(CHROMIUM is None, reason=NO_BROWSER)
@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_leaves_its_card(running: LiveServer, width: int, browser: Browser):
    page = browser.open(running.url)
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    page.send("Emulation.setDeviceMetricsOverride", **size)
    page.wait_for("document.querySelectorAll('.stage').length == 3")
    outside = page.run(
        "[...document.querySelectorAll('section')].flatMap((card) => "
        "[...card.querySelectorAll('*')].filter((each) => each.getBoundingClientRect().right "
        "> card.getBoundingClientRect().right).map((each) => each.outerHTML.slice(0, 80)))"
    )
    assert outside == []
    assert page.run("document.documentElement.scrollWidth") <= width


@pytest.mark.skipif(CHROMIUM is None, reason=NO_BROWSER)
def test_what_is_said_into_the_microphone_is_sent(running: LiveServer, tmp_path: Path):
    spoken, profile = tmp_path / "spoken.wav", tmp_path / "profile"
    soundfile.write(spoken, tone(20.0), SAMPLING_RATE)
    with Browser(profile, microphone=spoken) as browser:
        page = browser.open(running.url)
        page.wait_for("document.querySelectorAll('.stage').length == 3")
        page.run("$('mic').focus(); 0")
        page.press(" ", "Space", 32)
        page.wait_for("$('mic').getAttribute('aria-pressed') == 'true'")
        page.run("new Promise((done) => setTimeout(done, 500))")  # somebody speaks
        page.press(" ", "Space", 32)
        page.wait_for(f"{NAMES}.join() == 'recording'")
        assert page.run("$('mic').getAttribute('aria-pressed')") == "false"
        page.run("$('tokens').value = '4'; $('form').requestSubmit(); 0")
        page.wait_for("!abort && messages.length == 2")
        (part,) = page.run("messages[0].content")
        samples, rate = soundfile.read(io.BytesIO(b64decode(part["input_audio"]["data"])))
        # Of the length nothing is sure but that there is some; a tone is never silent.
        assert (part["type"], rate) == ("input_audio", 16_000)
        assert len(samples) > 1_600 and float((samples**2).mean()) > 1e-4
        nodes = page.send("Accessibility.getFullAXTree")["nodes"]
        nameless = {
            node["role"]["value"]
            for node in nodes
            if not node["ignored"]
            and not node["name"]["value"].strip()
            and any(each["name"] == "focusable" for each in node["properties"])
        }
        assert nameless == set(), "a screen reader could not say what these are"
        assert page.problems == []
