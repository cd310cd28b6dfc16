"""What a head is to the rest of the program: its batch, its output, its folder on disk, and its drafting interface.

Shapes: N packed positions of one micro-batch, R documents, A taps, T target hidden, H head hidden, D depths, V target
vocabulary, B requests, L new tokens per request, K draft tokens.
"""

from __future__ import annotations

import importlib
import json
import logging
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headtrain.config import SCRATCH, HeadSection, RecipeConfig
from headtrain.heads.start import start_marks
from headtrain.heads.vocab import coverage, draft_size, draft_vocab, mapping, moved_rows
from headtrain.hub_read import HEAD_FILES, head_folder
from headtrain.target import TargetParts

log = logging.getLogger(__name__)
RANKS = 10  # likeliest tokens of a depth that are told apart


@dataclass
class Batch:
    """One packed micro-batch: R documents one after another, N positions in all."""

    ids_N: Tensor  # int64, target token ids
    positions_N: Tensor  # int64, 0 … within each document
    cu_R1: Tensor  # int32 [R+1], where documents start and end
    supervised_N: Tensor  # bool, tokens the target produced
    taps_NAT: Tensor  # target residual stream at the head's taps; zeros at a document's last position
    last_NT: Tensor  # target hidden state after the final norm; zeros at a document's last position
    argmax_N: Tensor  # int64, the target's choice for the next token
    logsumexp_N: Tensor  # float32, of the target's logits
    count_D: Tensor | None = (
        None  # float32, trained pairs per depth of the whole optimizer step (all ranks, all micro-batches)
    )
    parts: int = 1  # world size x accumulation steps: micro-batches in that optimizer step
    rows: list[str] = field(default_factory=list)  # ids of the documents, for messages
    read_NT: Tensor | None = None  # last hidden states to read instead, where the teacher's are others

    def to(self, device, dtype=None) -> Batch:
        def move(value):
            if not isinstance(value, Tensor):
                return value
            return value.to(device, dtype if value.is_floating_point() and value is not self.logsumexp_N else None)

        values = {f.name: move(getattr(self, f.name)) for f in fields(self)}
        if self.count_D is not None:
            values["count_D"] = self.count_D.to(device)
        return Batch(**values)


@dataclass
class HeadOutput:
    """`loss`: scalar for backward. The rest: detached float32 sums per depth, added over micro-batches and ranks."""

    loss: Tensor
    loss_D: Tensor  # sum of the objective over trained pairs
    count_D: Tensor  # trained pairs
    correct_D: Tensor  # trained pairs whose top draft token is the target's choice
    reach_D: Tensor  # supervised pairs, in the draft vocab or not


@dataclass
class HeadConfig:
    """Everything training and serving must agree on; written into the head's config.json."""

    type: str = "eagle3"
    hidden_size: int = 0
    target_hidden_size: int = 0
    intermediate_size: int = 0
    num_attention_heads: int = 0
    num_key_value_heads: int = 0
    head_dim: int = 0
    vocab_size: int = 0  # of the target
    draft_vocab_size: int = 0
    rms_norm_eps: float = 1e-5
    rope: dict[str, Any] = field(default_factory=lambda: {"rope_theta": 10000.0, "rope_type": "default"})
    max_position_embeddings: int = 2048  # the target's
    taps: list[int] = field(default_factory=list)
    target_layers: int = 0
    unroll: int = 7
    norm_before_residual: bool = False
    norm_output: bool = False
    freeze_lm_head: bool = False
    made_for: dict[str, Any] = field(default_factory=dict)  # which target, template and captures (facts.made_for)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Head(nn.Module):
    """Base of all heads. A subclass is one file: network, training unroll, drafting.

    Buffers: `d2t` int64 [draft vocab] (target_id = draft_id + d2t[draft_id]) and `t2d` bool [V]; the frozen target
    embedding is held outside the state dict (`attach`), so that no tensor of the target is trained or saved.
    """

    Config: type[HeadConfig] = HeadConfig  # a head type with settings of its own has a subclass
    config: HeadConfig
    borrows_lm_head = False  # whether it drafts with the target's lm_head, which `load_head` then attaches too
    softcap: float | None = None  # of the target's logits
    marks: dict[str, str] = {}  # noqa: RUF012 - replaced, not changed: what it was when it was made (heads/start.py)
    by_depth = False  # whether what it says hangs on the depth alone, whatever was drafted; depths: config.unroll

    def scale_features(self, rms_AT: Tensor) -> None:
        """Tells the head the root mean square of the target's features, float32 [A, T]. Changes no output."""

    @classmethod
    def fresh(cls, section: HeadSection, parts: TargetParts) -> Head:
        """An untrained head for this target, random weights. The draft vocabulary has no mapping yet."""
        raise NotImplementedError

    def start_from(self, parts: TargetParts, selected: Tensor, sample: Batch, seed: int | None) -> None:
        """Takes over what the target gives a fresh head: the lm_head rows `selected`, its norm, the features' sizes.

        With a seed also the closed-form start (headtrain/heads/calibrate.py).
        """
        raise NotImplementedError

    def train_as(self, section: HeadSection) -> None:
        """Takes over what the recipe says about the training of a head that already exists (`head.init_from`)."""
        self.config.unroll = section.unroll

    def attach(self, embedding: Tensor, lm_head: Tensor | None = None) -> None:
        """Lends the head the target's frozen embedding [V, T] and, for training, its lm_head [V, T] (the teacher)."""
        raise NotImplementedError

    def draft_all(self, batch: Batch, depths: int) -> Tensor:
        """The greedy chain a server would draft from every slot at once: target ids, int64 [N, depths].

        Slot p's chain sees the true tokens up to p+1 and its own drafts after that.
        """
        raise NotImplementedError

    def ranked(self, batch: Batch, depths: int) -> Tensor:
        """For heads that draft by depth: `draft_all` with each depth's likeliest tokens, int64 [N, depths, ranks].

        How often they are right is kept in `config.accuracy` by the trainer; static trees are made from it.
        """
        raise NotImplementedError

    @property
    def ranks(self) -> int:
        return min(RANKS, self.config.draft_vocab_size)

    # training
    def forward(self, batch: Batch) -> HeadOutput:
        """The whole training forward, loss included (called through the DeepSpeed engine)."""
        raise NotImplementedError

    # drafting; `state` is whatever the head keeps between steps
    def start(self, batch: int, capacity: int) -> Any:
        """An empty drafting state for `batch` requests of at most `capacity` true slots (padding of `extend` included).

        Room for the nodes of `expand` is the head's own to make. Drafting depends on the state's `graph_key` and on
        what its tensors hold, nothing else, until `select`: so that it can be recorded as a CUDA graph.
        """
        raise NotImplementedError

    def extend(
        self, state: Any, tokens_BL: Tensor, taps_BLAT: Tensor, last_BLT: Tensor, counts_B: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Feeds the true prefix: slot features and the token *after* each slot; row b's first counts_B[b] are real.

        Drops whatever was drafted since the last call. Returns logits over the draft vocab [B, draft vocab] and hidden
        [B, H] at each row's last real slot: the first drafting step.
        """
        raise NotImplementedError

    def expand(self, state: Any, tokens_BM: Tensor, parents_BM: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Drafts on from M nodes per request: draft tokens (target ids) just chosen, below the nodes `parents_BM`.

        Nodes are numbered in the order of these calls since `extend`; -1 is the root, the last true slot. None: one
        node, below the last (a chain). A node sees the true prefix, its ancestors and itself; the state keeps each
        node's hidden, which its children are fed.
        Heads that draft all positions at once answer with the logits of the node's depth, whatever the tokens are.
        Returns logits [B, M, draft vocab] and hidden [B, M, H].
        """
        raise NotImplementedError

    def select(self, state: Any, rows: Tensor) -> None:
        """Keeps only the given requests of the state."""
        raise NotImplementedError

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        return draft_ids + self.d2t[draft_ids]

    def outputs(self) -> list[nn.Linear]:
        """The layers that have a row per draft token."""
        return [] if self.borrows_lm_head else [self.lm_head]


HEADS = {  # by head.type: module of this package, and class
    "eagle": "eagle.EagleHead",
    "eagle3": "eagle3.Eagle3Head",
    "medusa": "medusa.MedusaHead",
    "mtp": "mtp.MtpHead",
    "peagle": "peagle.PEagleHead",
}


def head_class(kind: str) -> type[Head]:
    """The class of a head type; ValueError names the known ones."""
    if kind not in HEADS:
        raise ValueError(f"head.type={kind}: unknown; known head types: {', '.join(sorted(HEADS))}")
    module, name = HEADS[kind].split(".")
    return getattr(importlib.import_module(f"headtrain.heads.{module}"), name)


def new_head(recipe: RecipeConfig, parts: TargetParts, supervised_V: Tensor, all_V: Tensor, sample: Batch) -> Head:
    """A head for a target, ready to train: fresh, or continued from `head.init_from`.

    supervised_V, all_V: int64 [V], how often each token occurs in the responses, and in prompts and responses together;
    the draft vocabulary is chosen by the first, then by the second, or read from the file `head.draft_vocab`. sample:
    some packed training rows, for the sizes of the features and, with head.start=calibrated, the closed-form start.
    """
    section, embedding, lm_head = recipe.head, parts.embedding, parts.lm_head
    if section.init_from not in (None, SCRATCH):
        head = _parent(section, parts)
        words = "mapping taken from parent"
        if section.rebuild_vocab:
            size = draft_size(section.draft_vocab, len(lm_head))
            kept = _change_vocab(head, _choose(section.draft_vocab, parts, supervised_V, all_V), lm_head)
            words = (
                f"mapping rebuilt: {kept} of {size} lm_head rows are the parent's, moved to their new index, "
                f"{size - kept} start from the target's"
            )
        inside, total = coverage(supervised_V, head.t2d)
        log.info("%s; covers %.1f %% of the new supervised tokens", words, 100 * inside / max(total, 1))
        size_AT = feature_size(sample, head.config).cpu().clamp(min=2**-19)
        head.scale_features(size_AT / torch.frexp(size_AT).mantissa)  # powers of two: drafts stay equal to the bit
    else:
        torch.manual_seed(recipe.seed)
        head = head_class(section.type).fresh(section, parts)
        selected = _choose(section.draft_vocab, parts, supervised_V, all_V)
        head.d2t, head.t2d = mapping(selected, len(lm_head))
        head.start_from(parts, selected, sample, recipe.seed if section.start == "calibrated" else None)
        head.marks = {} if section.lora.rank else start_marks(head)  # factors leave most matrices as they are
    head.attach(embedding, lm_head)
    head.rules, head.logit_scale = recipe.train, logit_scale(parts)
    head.softcap = getattr(parts.config, "final_logit_softcapping", None)
    return head


def logit_scale(parts: TargetParts) -> float:
    """What the target multiplies the products of its lm_head with (Granite, Cohere)."""
    divided, times = (getattr(parts.config, name, None) or 1 for name in ("logits_scaling", "logit_scale"))
    return times / divided


def _choose(asked: int | str, parts: TargetParts, supervised_V: Tensor, all_V: Tensor) -> Tensor:
    """The draft vocabulary asked for, ascending int64; warns when a reduced one has entries without an example."""
    selected = draft_vocab(asked, supervised_V, all_V, parts.eos_ids, parts.texts.get("tokenizer"))
    unseen = int((supervised_V[selected] == 0).sum())
    if unseen and len(selected) < len(supervised_V):
        log.warning("%d of %d entries of the draft vocabulary never occur in the responses", unseen, len(selected))
    return selected


def _parent(section: HeadSection, parts: TargetParts) -> Head:
    """The head of `head.init_from`, to be trained as the recipe says. ValueError naming the key that does not fit."""
    where = f"head.init_from={section.init_from}"
    head = load_head(head_folder(section.init_from, key="head.init_from")).train()
    c, (vocab, hidden) = head.config, parts.lm_head.shape
    if (c.vocab_size, c.target_hidden_size) != (vocab, hidden):
        raise ValueError(
            f"{where}: made for a target with {c.vocab_size} tokens and hidden size {c.target_hidden_size}; "
            f"this one has {vocab} and {hidden}"
        )
    fixed = {
        "type": c.type, "taps": c.taps, "heads": c.num_attention_heads, "kv_heads": c.num_key_value_heads,
        "head_dim": c.head_dim, "intermediate": c.intermediate_size, "norm_before_residual": c.norm_before_residual,
        "norm_output": c.norm_output, "layers": getattr(c, "layers", 1),
    }  # fmt: skip
    for key, own in fixed.items():
        if (asked := getattr(section, key)) not in (None, own):
            raise ValueError(f"head.{key}={asked}: the parent ({where}) has {own}; set head.{key}={own}")
    size = draft_size(section.draft_vocab, vocab)
    if size != c.draft_vocab_size and not section.rebuild_vocab:
        raise ValueError(
            f"head.draft_vocab={section.draft_vocab}: the draft vocabulary of the parent ({where}) has "
            f"{c.draft_vocab_size} entries; set head.draft_vocab={c.draft_vocab_size} to keep its mapping, or "
            "head.rebuild_vocab=true to choose a new one"
        )
    if section.rebuild_vocab and c.hidden_size != hidden:
        raise ValueError(
            f"head.rebuild_vocab=true: new lm_head rows are the target's, {hidden} wide, and those of the parent "
            f"({where}) are {c.hidden_size} wide; leave it out"
        )
    head.train_as(section)
    return head


def _change_vocab(head: Head, selected: Tensor, target_VT: Tensor) -> int:
    """Gives the head another draft vocabulary (ascending target ids); returns how many lm_head rows it keeps."""
    old = head.t2d.nonzero()[:, 0]
    for layer in head.outputs():
        rows, kept = moved_rows(layer.weight.detach(), old, selected, target_VT)
        layer.weight = nn.Parameter(rows, requires_grad=layer.weight.requires_grad)
        layer.out_features = head.config.draft_vocab_size = len(selected)
    head.d2t, head.t2d = mapping(selected, len(target_VT))
    return kept


def feature_size(sample: Batch, c: HeadConfig) -> Tensor:
    """Root mean square of every feature that the head reads over a sample's positions, float32 [A, T].

    Of a head without taps: of the last hidden state, [1, T].
    """
    features_NAT = sample.taps_NAT if c.taps else sample.last_NT[:, None]
    return features_NAT.float().square().mean(0).sqrt()


def check_tensors(wanted: dict[str, Tensor], found: dict[str, Tensor], where: str) -> None:
    """ValueError listing every missing, unknown or mis-shaped tensor of file `where`."""
    faults = [f"{name} is missing" for name in wanted.keys() - found.keys()]
    faults += [f"{name} is not a tensor of this head" for name in found.keys() - wanted.keys()]
    faults += [
        f"{name} has shape {list(found[name].shape)}, not {list(wanted[name].shape)}"
        for name in wanted.keys() & found.keys()
        if found[name].shape != wanted[name].shape
    ]
    if faults:
        raise ValueError(f"{where}: " + "; ".join(sorted(faults)))


def save_head(head: Head, folder: str | Path, dtype: torch.dtype | None = None) -> None:
    """Writes config.json and model.safetensors in the portable layout (`portable_config`), each file atomically."""
    from safetensors.torch import save_file

    from headtrain.files import write_json, writing

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: (t.to(dtype) if dtype and t.is_floating_point() else t).detach().cpu().contiguous().clone()
        for name, t in head.portable_tensors().items()
    }
    with writing(folder / "model.safetensors") as path:
        save_file(tensors, path, metadata={"format": "pt", **({"start": json.dumps(head.marks)} if head.marks else {})})
    write_json(folder / "config.json", head.portable_config(dtype or torch.float32))


def section_config(section: Any, where: str) -> HeadConfig:
    """The config that the `headtrain` section of file `where` records; ValueError naming the key that does not fit."""
    kind, bad = section.get("type", HeadConfig.type) if isinstance(section, dict) else None, None
    if not isinstance(kind, str):
        raise ValueError(f"{where}: its headtrain section does not fit (an object is needed, and in it a type)")
    default = vars(head_class(kind).Config())
    for key, value in section.items():
        of = type(default.get(key))
        if key not in default:
            bad = f"{kind} heads have no {key}"
        elif default[key] is not None and type(value) is not of and (of, type(value)) != (float, int):
            bad = f"{key}={value!r} is no {of.__name__}"
        if bad:
            raise ValueError(f"{where}: its headtrain section does not fit ({bad})")
    return head_class(kind).Config(**section)


def load_head(
    folder: str | Path,
    embedding: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    lm_head: Tensor | None = None,
) -> Head:
    """Reads a folder written by `save_head`, or a Hub id (`user/name@revision`). `embedding` and `lm_head` are the
    target's, [V, T]; needed before the head can run, the latter by types that draft with it.

    Raises ValueError naming the file and the missing, extra or mis-shaped tensor.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    from headtrain.files import read_json

    folder = head_folder(folder)
    for name in HEAD_FILES:
        if not (folder / name).is_file():
            raise ValueError(f"{folder} is not a head folder: {name} is missing")
    written = read_json(folder / "config.json", "copy the head again")
    if not isinstance(written, dict) or "headtrain" not in written:
        raise ValueError(
            f"{folder / 'config.json'} has no `headtrain` section; import the head first (headtrain import)"
        )
    config, weights = section_config(written["headtrain"], str(folder / "config.json")), folder / "model.safetensors"
    try:
        tensors = load_file(weights)
    except SafetensorError as error:
        raise ValueError(f"{weights} cannot be read ({error}); copy the head again") from error
    head = head_class(config.type)(config)
    head.load_portable(tensors, str(weights))
    if embedding is not None:
        head.attach(embedding, lm_head if head.borrows_lm_head else None)
    return head.to(dtype).eval()
