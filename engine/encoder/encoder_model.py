"""A bidirectional encoder of transformers, run over padded batches, rows out."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel

from engine.checkpoints.config_file import describe
from engine.checkpoints.quiet_transformers import hidden_progress_bars
from engine.checkpoints.weight_files import WeightFiles
from engine.resources.device import on_device

__all__ = ["EncoderModel"]


class EncoderModel:
    """Loads a checkpoint's encoder and says what it takes and what it gives.

    Attributes:
        hidden_size: width of an embedding row that it takes.
        vocab_size: token ids are below this.
        max_positions: tokens of the longest input; None if the architecture has no limit.
        takes_embeds: whether rows can be given in the place of ids.
        row_nbytes: per-token tensors that a forward pass gives, with the bytes of one row.
        pooler: the checkpoint's own pooling head: ``(1, n, hidden) -> (1, D)``; None when it has
            none, or one that cannot be applied to stored hidden states.

    Raises:
        ValueError: the model is no bidirectional encoder, or weights are missing.
    """

    def __init__(
        self,
        folder: str,
        config: PreTrainedConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        trust_remote_code: bool = False,
    ) -> None:
        _check_is_encoder(config)
        self.dtype = dtype
        self.device = device
        self._module, missing = _load(folder, config, dtype, trust_remote_code)
        nn.Module.to(self._module, device).eval()
        embeddings = self._module.get_input_embeddings()
        if not isinstance(embeddings, nn.Embedding):
            raise ValueError(
                f"{self.architecture} embeds its input by no table: it is no text encoder"
            )
        self.vocab_size, self.hidden_size = embeddings.num_embeddings, embeddings.embedding_dim
        self.max_positions = _max_positions(self._module)
        self.takes_embeds = "inputs_embeds" in inspect.signature(self._module.forward).parameters
        self._pad_id = _pad_id(config, self.vocab_size)
        self._check_is_bidirectional(folder)
        self.row_nbytes = self._discover_rows()
        self.pooler = None if missing else self._usable_pooler()

    @property
    def architecture(self) -> str:
        """Name of the class that runs."""
        return type(self._module).__name__

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""
        return sum(p.numel() * p.element_size() for p in self._module.parameters())

    def forward(self, batch: Sequence[Tensor]) -> dict[str, Tensor]:
        """Run several inputs in one pass, padded to the longest.

        Args:
            batch: all ``(n_i,)`` int64 token ids, or all ``(n_i, hidden_size)`` embeddings.

        Returns:
            Per name ``(sum of n_i, ...)`` on the CPU: the inputs' rows, one after the other.
        """
        lengths = torch.tensor([len(entry) for entry in batch])
        if batch[0].ndim == 2:
            embeds = pad_sequence([e.to(self.dtype) for e in batch], batch_first=True)
            return self._forward(lengths, inputs_embeds=embeds.to(self.device))
        ids = pad_sequence(list(batch), batch_first=True, padding_value=self._pad_id)
        return self._forward(lengths, input_ids=ids.to(self.device))

    @torch.inference_mode()
    def _forward(self, lengths: Tensor, **inputs: Tensor) -> dict[str, Tensor]:
        longest = int(lengths.max())
        mask = torch.arange(longest) < lengths[:, None]
        with on_device(self.device):
            output = self._module(
                **inputs, attention_mask=mask.to(self.device, torch.int64), return_dict=True
            )
        batch_shape = tuple(mask.shape)
        keep = mask.to(self.device)
        return {
            "hidden_states" if name == "last_hidden_state" else name: value[keep].cpu()
            for name, value in output.items()
            # Everything else (a pooled row, say) is not per token.
            if isinstance(value, Tensor) and value.dim() > 1 and value.shape[:2] == batch_shape
        }

    def _check_is_bidirectional(self, folder: str) -> None:
        """A causal model computes the first row before it sees the second token."""
        first, second = 1 % self.vocab_size, 2 % self.vocab_size
        pair = [torch.tensor([first, first]), torch.tensor([first, second])]
        rows = self.forward(pair)["hidden_states"]
        if torch.equal(rows[0], rows[2]):
            raise ValueError(
                f"{self.architecture} in {folder} attends to earlier tokens only: it is a causal "
                "decoder. "
                "LLMEngine runs those (max_tokens=0 runs the prompt only), with true prefix hits"
            )

    def _discover_rows(self) -> Mapping[str, int]:
        """Names that are per token at two batch shapes: at one, D might equal the length."""
        token = torch.tensor([1 % self.vocab_size])
        small = self.forward([token.repeat(2)] * 2)
        large = self.forward([token.repeat(3)])
        return {name: small[name][0].nbytes for name in small if name in large}

    @torch.inference_mode()
    def _usable_pooler(self) -> nn.Module | None:
        """The module's ``pooler``, if applying it to its hidden states gives what it gives."""
        pooler = getattr(self._module, "pooler", None)
        if not isinstance(pooler, nn.Module):
            return None
        ids = torch.tensor([[1 % self.vocab_size, 2 % self.vocab_size, 1 % self.vocab_size]])
        output = self._module(input_ids=ids.to(self.device), return_dict=True)
        expected = output.get("pooler_output")
        if expected is None:
            return None
        applied = pooler(output.last_hidden_state)
        same = isinstance(applied, Tensor) and applied.shape == expected.shape
        return pooler if same and torch.allclose(applied, expected, atol=1e-3) else None


def _check_is_encoder(config: PreTrainedConfig) -> None:
    names = getattr(config, "architectures", None) or [config.model_type]
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(
            f"{names[0]} is an encoder-decoder; EncoderEngine runs encoder-only models (BERT, "
            "RoBERTa, DistilBERT, ...). Its encoder alone is not supported yet"
        )


def _load(
    folder: str, config: PreTrainedConfig, dtype: torch.dtype, trust_remote_code: bool
) -> tuple[PreTrainedModel, bool]:
    """The module, and whether the checkpoint lacks the weights of its pooler."""
    try:
        _check_weights(Path(folder), config, trust_remote_code)
        with hidden_progress_bars():
            module, info = AutoModel.from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                use_safetensors=True,
                output_loading_info=True,
                trust_remote_code=trust_remote_code,
            )
    # Values of a wrong kind make transformers raise whatever it stumbles over.
    except Exception as error:
        raise ValueError(f"cannot load an encoder from {folder}: {describe(error)}") from error
    missing = sorted(info["missing_keys"])
    lacking = [name for name in missing if not name.startswith("pooler.")]
    if lacking:
        raise ValueError(
            f"{folder} lacks {len(lacking)} weights of {type(module).__name__}: "
            + ", ".join(lacking[:5])
        )
    return module, bool(missing)


def _check_weights(folder: Path, config: PreTrainedConfig, trust_remote_code: bool) -> None:
    """Compare the headers of the files with the module, which has no memory for weights yet."""
    with torch.device("meta"):
        module = AutoModel.from_config(deepcopy(config), trust_remote_code=trust_remote_code)
    # A checkpoint that has a head as well puts a name before those of the module.
    places, prefix = module.state_dict(), f"{module.base_model_prefix}."
    files = WeightFiles(folder)
    named = {name: name.removeprefix(prefix) for name in files.files}
    files.check({name: places[own] for name, own in named.items() if own in places})


def _max_positions(module: PreTrainedModel) -> int | None:
    for name, part in module.named_modules():
        if name.endswith("position_embeddings") and isinstance(part, nn.Embedding):
            # RoBERTa and its kin count positions from one after the padding index.
            offset = 0 if part.padding_idx is None else part.padding_idx + 1
            return part.num_embeddings - offset
    limit: int | None = getattr(module.config, "max_position_embeddings", None)
    return limit


def _pad_id(config: PreTrainedConfig, vocab_size: int) -> int:
    # Padding is masked, but RoBERTa tells positions by this very id.
    pad_id = getattr(config, "pad_token_id", None)
    return pad_id if isinstance(pad_id, int) and 0 <= pad_id < vocab_size else 0
