"""From a transformers configuration to the numbers that matter, with what is not supported named."""

from dataclasses import dataclass
from typing import Any

from megaflow.errors import ConfigError
from megaflow.tasks.topk import MOST_EXPERTS, MOST_SLOTS

MODEL_TYPES = ("qwen3", "qwen3_moe", "qwen2_moe")
HEAD_DIMS = (64, 128)
DEFAULT_SEQ_LEN = 2048
ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # static kinds: cos and sin depend on the position alone


@dataclass(frozen=True)
class Experts:
    """Sizes of the sparse layers' mixture of experts.

    Attributes:
        count: experts of a layer; per_token: those that each token goes to (top-k).
        width: of an expert's MLP.
        normalized: whether the weights of a token's experts are divided by their sum.
        layers: numbers of the sparse layers; the others have a dense MLP.
        shared_width: of the MLP that all tokens share, beside their own experts; 0 if there is none.
    """

    count: int
    per_token: int
    width: int
    normalized: bool
    layers: tuple[int, ...]
    shared_width: int = 0

    @property
    def router_rows(self) -> int:
        """A logit for each expert, and behind them one for the shared expert's gate."""
        return self.count + (self.shared_width > 0)

    def pairs(self, batch: int) -> int:
        """Pairs of a token and one of its experts in a batch."""
        return batch * self.per_token

    def most_active(self, batch: int) -> int:
        """The most experts that a batch can go to."""
        return min(self.count, self.pairs(batch))


@dataclass(frozen=True)
class Geometry:
    """Sizes of a Qwen3 or Qwen2-MoE model.

    Attributes:
        hidden: width of the residual stream; intermediate: width of a dense layer's MLP.
        heads, kv_heads: attention heads and KV heads; head_dim: width of each.
        vocab: rows of the embedding; tied: whether the LM head is the embedding.
        eps: of every RMSNorm; max_positions: the context the configuration allows.
        experts: of the sparse layers, None in a model without any.
        qk_norm: whether there is an RMSNorm of each query and key; qkv_bias: whether queries, keys and values have a
            bias.
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    eps: float
    max_positions: int
    experts: Experts | None = None
    qk_norm: bool = True
    qkv_bias: bool = False

    def is_sparse(self, layer: int) -> bool:
        """Whether a layer has experts instead of a dense MLP."""
        return self.experts is not None and layer in self.experts.layers

    @property
    def group(self) -> int:
        """Query heads for each KV head (GQA ratio)."""
        return self.heads // self.kv_heads

    def sequence_limit(self, asked: int | None) -> int:
        """Most tokens of a sequence: what is asked for, by default 2048 or what the configuration allows if less.

        Raises:
            ConfigError: beyond what the configuration allows.
        """
        limit = min(DEFAULT_SEQ_LEN, self.max_positions) if asked is None else asked
        if not 1 <= limit <= self.max_positions:
            raise ConfigError(
                f"max_seq_len is {limit}; the configuration's max_position_embeddings allows 1 to {self.max_positions}"
            )
        return limit

    @property
    def qkv_rows(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def attention_width(self) -> int:
        return self.heads * self.head_dim


def read_geometry(config: Any) -> Geometry:
    """The geometry of a transformers Qwen3Config, Qwen3MoeConfig or Qwen2MoeConfig.

    Raises:
        ConfigError: for another architecture, a quantised checkpoint, or a field whose value is not supported.
    """
    if config.model_type not in MODEL_TYPES:
        types = ", ".join(map(repr, MODEL_TYPES))
        raise ConfigError(f"model_type is {config.model_type!r}; megaflow decodes {types}")
    if getattr(config, "quantization_config", None) is not None:
        method = dict(config.quantization_config).get("quant_method", "unknown")
        raise ConfigError(
            f"quantization_config.quant_method is {method!r}; quantised checkpoints are not supported, "
            "use the bfloat16 checkpoint of the same model"
        )
    _require(config.hidden_act == "silu", "hidden_act", config.hidden_act, "'silu'")
    bias = getattr(config, "attention_bias", False)  # of qkv and o_proj; Qwen2-MoE has qkv_bias instead
    _require(not bias, "attention_bias", bias, "False")
    layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
    _require(layer_types == {"full_attention"}, "layer_types", sorted(layer_types), "only 'full_attention'")
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads  # as transformers does
    _require(head_dim in HEAD_DIMS, "head_dim", head_dim, f"one of {HEAD_DIMS}")
    experts = _read_experts(config) if config.model_type != "qwen3" else None
    dense = experts is None or len(experts.layers) < config.num_hidden_layers
    for field in ("hidden_size", *(["intermediate_size"] if dense else [])):
        _require_multiple_of_16(config, field)
    _require(heads % kv_heads == 0, "num_key_value_heads", kv_heads, f"a divisor of {heads} attention heads")
    rope = getattr(config, "rope_parameters", None) or {}
    partial = rope.get("partial_rotary_factor", 1.0)
    _require(partial == 1.0, "rope_parameters.partial_rotary_factor", partial, "1.0")
    rope_type = rope.get("rope_type", "default")
    _require(rope_type in ROPE_TYPES, "rope_parameters.rope_type", rope_type, f"one of {ROPE_TYPES}")
    return Geometry(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=config.vocab_size,
        tied=bool(config.tie_word_embeddings),
        eps=config.rms_norm_eps,
        max_positions=config.max_position_embeddings,
        experts=experts,
        qk_norm=config.model_type != "qwen2_moe",
        qkv_bias=bool(getattr(config, "qkv_bias", False)),
    )


def _read_experts(config: Any) -> Experts | None:
    """The experts of a Qwen3MoeConfig or Qwen2MoeConfig, None if all its layers are dense. Raises ConfigError."""
    _require(not config.use_sliding_window, "use_sliding_window", config.use_sliding_window, "False")
    count, per_token, step = config.num_experts, config.num_experts_per_tok, config.decoder_sparse_step
    _require(0 <= count <= MOST_EXPERTS, "num_experts", count, f"0 to {MOST_EXPERTS}")
    _require(step >= 1, "decoder_sparse_step", step, "1 or more")
    if count == 0:
        return None
    dense = set(config.mlp_only_layers or [])
    layers = tuple(i for i in range(config.num_hidden_layers) if i not in dense and (i + 1) % step == 0)
    if not layers:
        return None
    most = min(MOST_SLOTS, count)
    _require(1 <= per_token <= most, "num_experts_per_tok", per_token, f"1 to {most}")
    _require_multiple_of_16(config, "moe_intermediate_size")
    shared_width = 0
    if config.model_type == "qwen2_moe":
        _require_multiple_of_16(config, "shared_expert_intermediate_size")
        shared_width = config.shared_expert_intermediate_size
    return Experts(count, per_token, config.moe_intermediate_size, bool(config.norm_topk_prob), layers, shared_width)


def _require_multiple_of_16(config: Any, field: str) -> None:
    value = getattr(config, field)
    _require(value > 0 and value % 16 == 0, field, value, "a multiple of 16")


def _require(holds: bool, field: str, value: object, limit: str) -> None:
    if not holds:
        raise ConfigError(f"configuration field {field} is {value!r}; supported: {limit}")
