"""The mouth's training: what it shares with the engine, and short cuts that change no number."""

from math import prod

import pytest
import torch
from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniBigVGANConfig

from training.spoken_sums.bigvgan import make_bigvgan, quicken, sound_of
from training.spoken_sums.codes import FRAMES_PER_CODE, Codebook, learn_codebook
from training.spoken_sums.dit import Voice, flow_of, make_dit
from training.spoken_sums.mel import HOP, MEL_MAX, MEL_MIN, NUM_BANDS, mel_of
from training.spoken_sums.mouth_sizes import BIGVGAN, DIT, NUM_CODES, TALKER


def test_spectrograms_are_as_the_vocoder_reads_them():
    samples = torch.randn(2, 4800, generator=torch.Generator().manual_seed(0)) * 0.1
    mel = mel_of(samples)

    assert mel.shape == (2, 4800 // prod(BIGVGAN["upsample_rates"]), NUM_BANDS)
    assert prod(BIGVGAN["upsample_rates"]) == HOP
    assert (BIGVGAN["mel_dim"], DIT["mel_dim"]) == (NUM_BANDS, NUM_BANDS)
    assert DIT["repeats"] == FRAMES_PER_CODE
    # BigVGAN clips decibels: what it clips must not be told apart by what it learns from.
    network = make_bigvgan(torch.Generator().manual_seed(0))
    ends = network.process_mel_spectrogram(torch.tensor([MEL_MIN, MEL_MAX]))
    assert ends[0] > -1 and ends[1] == pytest.approx(1, abs=0.01)
    assert mel.min() >= MEL_MIN and mel.max() <= MEL_MAX


def test_a_louder_sound_has_larger_values_and_silence_the_least():
    tone = torch.sin(torch.arange(4800) * 0.1)
    quiet, loud = mel_of(tone * 0.01), mel_of(tone * 0.1)

    assert (loud >= quiet).all() and loud.max() > quiet.max() + 0.5
    assert (mel_of(torch.zeros(4800)) == mel_of(torch.zeros(4800)).min()).all()


def test_code_0_is_nobodys_and_every_code_fits_talker_and_flow(tmp_path):
    generator = torch.Generator().manual_seed(0)
    mels = [torch.randn(500, NUM_BANDS, generator=generator) for _ in range(6)]

    codebook = learn_codebook(mels, tmp_path / "codebook.pt")
    codes = codebook.encode(mels[0])

    assert len(codebook.patches) == NUM_CODES - 1
    assert codes.shape == (250,) and codes.min() >= 1 and codes.max() < NUM_CODES
    assert TALKER["tts_codec_pad_token_id"] == NUM_CODES < TALKER["vocab_size"]
    assert TALKER["vocab_size"] <= DIT["num_embeds"] + 1
    assert torch.equal(learn_codebook([], tmp_path / "codebook.pt").patches, codebook.patches)


def test_codes_stand_for_the_nearest_frames():
    patches = torch.randn(NUM_CODES - 1, 160, generator=torch.Generator().manual_seed(0))
    codebook = Codebook(patches)
    codes = torch.tensor([1, 700, NUM_CODES - 1, 7])

    mel = codebook.decode(codes) + 0.01

    assert mel.shape == (8, NUM_BANDS)
    assert codebook.encode(mel).tolist() == codes.tolist()


def test_the_quick_snake_is_the_anti_aliased_one_and_has_its_gradient():
    config = Qwen2_5OmniBigVGANConfig(**BIGVGAN | {"upsample_initial_channel": 64})
    network = make_bigvgan(torch.Generator().manual_seed(0), config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if name.endswith(("alpha", "beta")):
                parameter.normal_(0, 0.5, generator=generator)
    mel = torch.randn(2, 16, NUM_BANDS, generator=generator)

    def run():
        network.zero_grad()
        samples = sound_of(network, mel)
        samples.square().sum().backward()
        return samples, {name: part.grad.clone() for name, part in network.named_parameters()}

    samples, gradients = run()
    with torch.no_grad():
        engine_sees = network(mel.transpose(1, 2))
    torch.testing.assert_close(engine_sees, samples.clamp(-1, 1).detach(), rtol=0, atol=1e-6)

    quicken(network)
    quick_samples, quick_gradients = run()

    torch.testing.assert_close(quick_samples, samples, rtol=0, atol=1e-5)
    for name, gradient in gradients.items():
        largest = gradient.abs().max()
        torch.testing.assert_close(quick_gradients[name], gradient, rtol=0, atol=1e-4 * largest)


@pytest.mark.parametrize("is_free", [False, True])
def test_the_flow_in_training_is_the_one_of_transformers(is_free):
    network = make_dit(0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, 0.05, generator=generator)
    voices = [
        Voice(torch.randn(1, 16, generator=generator), torch.randn(1, 40, 80, generator=generator))
        for _ in range(2)
    ]
    frames = torch.randn(2, 48, 80, generator=generator)
    codes = torch.randint(1, NUM_CODES, (2, 24), generator=generator)
    time = torch.rand(2, generator=generator)

    with torch.no_grad():
        expected = network(
            hidden_states=frames,
            condition_vector=torch.cat([voice.reference_mel for voice in voices]),
            speaker_embedding=torch.cat([voice.conditioning for voice in voices])[:, None].expand(
                -1, 48, -1
            ),
            quantized_code=codes,
            time_step=time,
            drop_audio_conditioning=is_free,
            drop_code=is_free,
            apply_cfg=False,
        )
        rows = torch.tensor([-1, -1] if is_free else [0, 1])
        made = flow_of(network, frames, time, codes * (not is_free), voices, rows)

    assert expected.std() > 0.1
    torch.testing.assert_close(made, expected, rtol=0, atol=1e-5)
