"""Weights of named models, as batches of per-head blocks: what the kernel is for."""

from typing import NamedTuple


class Matrix(NamedTuple):
    """The heads of one weight.

    Attributes:
        model: Whose weight it is.
        weight: Its name, or those of several that are alike.
        blocks: Heads of one layer's weight.
        rows: Rows of a block.
        cols: Columns.
        layers: Weights of this kind in the model, of all layers together.
    """

    model: str
    weight: str
    blocks: int
    rows: int
    cols: int
    layers: int


NAMED = (
    Matrix("GLM-5.2", "q_b", 64, 256, 2048, 78),
    Matrix("GLM-5.2", "kv_b, k", 64, 192, 512, 78),
    Matrix("GLM-5.2", "kv_b, v", 64, 256, 512, 78),
    Matrix("GLM-5.2", "kv_b, joint", 64, 448, 512, 78),
    Matrix("Kimi-K3", "KDA q, k, v", 96, 128, 7168, 69 * 3),
    Matrix("Kimi-K3", "MLA q_b", 96, 192, 1536, 24),
    Matrix("Kimi-K3", "MLA kv_b", 96, 256, 512, 24),
    Matrix("DeepSeek-V2-Lite", "q", 16, 192, 2048, 27),
    Matrix("DeepSeek-V2-Lite", "kv_b", 16, 256, 512, 27),
    Matrix("Llama-3-70B", "q", 64, 128, 8192, 80),
    Matrix("Llama-3-70B", "k, v", 8, 128, 8192, 80 * 2),
)
