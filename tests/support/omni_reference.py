"""All of Qwen2.5-Omni in transformers: messages in; text, codec tokens and waveform out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray
from PIL.Image import Image
from torch import Tensor
from transformers import (
    AutoFeatureExtractor,
    AutoImageProcessor,
    AutoTokenizer,
    Qwen2_5OmniForConditionalGeneration,
)

from engine import VideoFeatures
from tests.support.thinker_reference import NoVideos, Processor


@dataclass(frozen=True)
class OmniAnswer:
    """The outputs of one request."""

    text_ids: tuple[int, ...]
    codes: tuple[int, ...]
    samples: Tensor


def _give_mask_back(
    talker: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Undo what ``generate`` does since 5.x: it drops a mask of ones before it calls ``forward``.

    The talker's ``forward`` takes the mask as the sign to place tokens on three axes and to add the
    embeddings of codec pad and bos; without one it silently does neither. It does both for a padded
    batch, so the same request would get other codes alone than in a batch.
    """
    if kwargs.get("attention_mask") is None:
        cache, embeds = kwargs.get("past_key_values"), kwargs.get("inputs_embeds")
        num_new = (kwargs["input_ids"] if embeds is None else embeds).shape[1]
        num_past = 0 if cache is None else cache.get_seq_length()
        kwargs["attention_mask"] = torch.ones(1, num_past + num_new, dtype=torch.int64)
    return args, kwargs


class OmniReference:
    """One checkpoint, one request at a time, greedy."""

    def __init__(
        self,
        folder: str,
        *,
        num_text: int = 12,
        num_codes: int = 24,
        num_steps: int = 2,
        seed: int = 0,
        suppressed: Sequence[int] = (),
        restores_mask: bool = True,
    ) -> None:
        self.model = Qwen2_5OmniForConditionalGeneration.from_pretrained(
            folder, dtype=torch.float32
        ).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self._processor = Processor(
            image_processor=AutoImageProcessor.from_pretrained(folder, backend="pil"),
            video_processor=NoVideos(),
            feature_extractor=AutoFeatureExtractor.from_pretrained(folder),
            tokenizer=self.tokenizer,
            chat_template=self.tokenizer.chat_template,
        )
        self._num_text, self._num_codes, self._num_steps = num_text, num_codes, num_steps
        self._seed, self._suppressed = seed, list(suppressed)
        self._codes: list[Tensor] = []
        # Its noise comes from the global generator, and its codes go nowhere else.
        self.model.token2wav.register_forward_pre_hook(self._begin_vocoder)
        if restores_mask:
            self.model.talker.register_forward_pre_hook(_give_mask_back, with_kwargs=True)

    def _begin_vocoder(self, module: Any, args: tuple[Tensor, ...]) -> None:
        self._codes.append(args[0][0])
        torch.manual_seed(self._seed)

    def inputs(
        self,
        messages: Sequence[Mapping[str, Any]],
        images: Sequence[Image] = (),
        audio: Sequence[NDArray[Any]] = (),
        video: VideoFeatures | None = None,
    ) -> dict[str, Tensor]:
        """Return the model's inputs."""
        text = self.tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=True
        )
        sound: dict[str, Any] = {}
        if video is not None and video.audio is not None:
            sound = self._sound_of(video.audio)
            text = text.replace("<|VIDEO|>", self._in_step(video, sound["feature_attention_mask"]))
        elif video is not None:
            rows = int(torch.as_tensor(video.video_grid_thw).prod()) // 4
            text = text.replace("<|VIDEO|>", "<|VIDEO|>" * rows)
        given: dict[str, Any] = {"images": list(images)} if images else {}
        given |= {"audio": list(audio)} if audio else {}
        # The processor counts videos but cannot process any itself.
        make = self._processor if video is None else self.tokenizer
        inputs = dict(make(text=text, return_tensors="pt", **given))
        inputs.pop("num_audio_tokens", None)
        if "pixel_values" in inputs:
            # Under its own name it would be passed to the talker as well, which fails.
            inputs["thinker_pixel_values"] = inputs.pop("pixel_values")
        if video is not None:
            inputs["thinker_pixel_values_videos"] = video.pixel_values_videos
            inputs["video_grid_thw"] = torch.as_tensor(video.video_grid_thw).reshape(1, 3)
            inputs["video_second_per_grid"] = torch.tensor([video.second_per_grid])
        return inputs | sound

    def _sound_of(self, samples: NDArray[Any]) -> dict[str, Any]:
        output = self._processor.feature_extractor(
            samples,
            sampling_rate=16_000,
            padding="max_length",
            return_attention_mask=True,
            return_tensors="pt",
        )
        return {
            "input_features": output["input_features"],
            "feature_attention_mask": output["attention_mask"],
            "use_audio_in_video": True,
        }

    def _in_step(self, video: VideoFeatures, sound_mask: Tensor) -> str:
        """Return placeholders by the processor's own function."""
        num_frames = int(sound_mask.sum())
        thinker = self.model.config.thinker_config
        text: str = self._processor.replace_video_with_audio_token(
            {
                "video_grid_thw": torch.as_tensor(video.video_grid_thw).reshape(1, 3).tolist(),
                "video_second_per_grid": [video.second_per_grid],
            },
            0,
            {"num_audio_tokens": [((num_frames - 1) // 2 - 1) // 2 + 1]},
            0,
            position_id_per_seconds=thinker.position_id_per_seconds,
            seconds_per_chunk=thinker.seconds_per_chunk,
        )
        return text

    @torch.inference_mode()
    def answer(
        self,
        messages: Sequence[Mapping[str, Any]],
        images: Sequence[Image] = (),
        audio: Sequence[NDArray[Any]] = (),
        video: VideoFeatures | None = None,
        *,
        speaker: str = "Chelsie",
        repetition_penalty: float = 1.0,
    ) -> OmniAnswer:
        """Run the three models one after the other."""
        inputs = self.inputs(messages, images, audio, video)
        (answer,) = self._generate(inputs, speaker, repetition_penalty)
        return answer

    @torch.inference_mode()
    def answer_padded(self, chats: Sequence[Sequence[Mapping[str, Any]]]) -> list[OmniAnswer]:
        """Run text chats as one batch, the shorter ones padded on their left."""
        texts = [
            self.tokenizer.apply_chat_template(
                list(chat), tokenize=False, add_generation_prompt=True
            )
            for chat in chats
        ]
        inputs = self.tokenizer(texts, padding=True, padding_side="left", return_tensors="pt")
        return self._generate(dict(inputs), "Chelsie", 1.0)

    def _generate(
        self, inputs: dict[str, Tensor], speaker: str, repetition_penalty: float
    ) -> list[OmniAnswer]:
        talker = self.model.config.talker_config
        self._codes.clear()
        ids, samples = self.model.generate(
            **inputs,
            speaker=speaker,
            thinker_max_new_tokens=self._num_text,
            thinker_do_sample=False,
            thinker_suppress_tokens=self._suppressed,
            talker_max_new_tokens=self._num_codes,
            talker_do_sample=False,
            talker_repetition_penalty=repetition_penalty,
            talker_eos_token_id=[talker.tts_codec_pad_token_id, talker.tts_codec_end_token_id],
            token2wav_num_steps=self._num_steps,
        )
        # A batch of one is returned without its list.
        waveforms = samples if isinstance(samples, list) else [samples]
        texts = ids[:, inputs["input_ids"].shape[1] :].tolist()
        return [
            OmniAnswer(tuple(text), tuple(codes.tolist()), waveform)
            for text, codes, waveform in zip(texts, self._codes, waveforms, strict=True)
        ]
