"""Real architectures at a small size: ``ZOO[name]()`` is a model and what to call it with, the same every time.

Nothing is downloaded: torchvision with ``weights=None``, timm with ``pretrained=False``, transformers from a config.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn


class Case(NamedTuple):
    """A model and what to call it with."""

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    name: str = ""


ZOO: dict[str, Callable[[], Case]] = {}

FUSED = {"nn_transformer_encoder"}
"""PyTorch leaves the fused path of these as soon as any hook is on them: their output changes in the last bits."""

MANY_LAYERS = {
    "torchvision_efficientnet_b0",
    "torchvision_googlenet",
    "torchvision_lraspp_mobilenet_v3_large",
    "torchvision_regnet_y_400mf",
    "timm_ghostnet_050",
    "timm_hrnet_w18_small",
    "timm_levit_128s",
    "timm_mobilevit_xxs",
}
"""These take several seconds each."""

WITHOUT_GRADIENT = {"transformers_llama_generate"}
"""These turn gradients off by themselves."""


def entry(build: Callable[[], Case], name: str | None = None, *, train: bool = False) -> Callable[[], Case]:
    """Put a model into the zoo, in eval mode unless ``train``."""

    name = name or build.__name__

    def seeded() -> Case:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what a library says of itself while it is imported
            torch.manual_seed(0)
            case = build()
        case.model.train(train)
        return case._replace(name=name)

    ZOO[name] = seeded
    return seeded


def training(build: Callable[[], Case]) -> Callable[[], Case]:
    return entry(build, train=True)


def image(size: int = 64, batch: int = 2) -> torch.Tensor:
    return torch.randn(batch, 3, size, size)


def tokens(length: int = 8, batch: int = 2, vocabulary: int = 64) -> torch.Tensor:
    return torch.randint(3, vocabulary, (batch, length))


# -- torch.nn -----------------------------------------------------------------------------------------------------


class Tagger(nn.Module):
    """An LSTM over sentences of different lengths: the packed sequence passes from module to module."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16, padding_idx=0)
        self.lower = nn.LSTM(16, 12, bidirectional=True, batch_first=True)
        self.upper = nn.LSTM(24, 12, num_layers=2, batch_first=True, dropout=0.2)
        self.tag = nn.Linear(12, 7)

    def forward(self, words: torch.Tensor, lengths: torch.Tensor) -> dict[str, Any]:
        packed = nn.utils.rnn.pack_padded_sequence(self.embed(words), lengths, batch_first=True, enforce_sorted=False)
        below, _ = self.lower(packed)
        above, (state, _) = self.upper(below)
        padded, sizes = nn.utils.rnn.pad_packed_sequence(above, batch_first=True)
        return {"tags": self.tag(padded), "packed": above, "state": state, "lengths": sizes}


class Translator(nn.Module):
    """Encoder and greedy decoder: the decoder's cell and head run once for every step."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 16)
        self.encoder = nn.GRU(16, 16, batch_first=True)
        self.cell = nn.GRUCell(16, 16)
        self.head = nn.Linear(16, 40)

    def forward(self, source: torch.Tensor, steps: int) -> torch.Tensor:
        _, state = self.encoder(self.embed(source))
        hidden, word, scores = state[0], source[:, 0], []
        for _ in range(steps):
            hidden = self.cell(self.embed(word), hidden)
            scores.append(self.head(hidden))
            word = scores[-1].argmax(-1)
        return torch.stack(scores, 1)


@training
def nn_lstm_tagger() -> Case:
    return Case(Tagger(), (torch.randint(1, 50, (3, 6)),), {"lengths": torch.tensor([4, 6, 2])})


@entry
def nn_gru_translator() -> Case:
    return Case(Translator(), (torch.randint(0, 40, (2, 5)), 4))


@entry
def nn_transformer_encoder() -> Case:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    padding = torch.tensor([[False] * 7, [False] * 4 + [True] * 3])
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return Case(model, (torch.randn(2, 7, 32),), {"src_key_padding_mask": padding})


@training
def nn_transformer() -> Case:
    model = nn.Transformer(32, 4, 2, 2, 64, batch_first=True)
    mask = nn.Transformer.generate_square_subsequent_mask(6)
    return Case(model, (torch.randn(2, 7, 32), torch.randn(2, 6, 32)), {"tgt_mask": mask, "tgt_is_causal": True})


# -- torchvision --------------------------------------------------------------------------------------------------


def _torchvision(name: str, *args: Any, train: bool = False, **options: Any) -> None:
    def build() -> Case:
        import torchvision

        options.setdefault("num_classes", 10)
        return Case(torchvision.models.get_model(name, weights=None, **options), args or (image(),))

    entry(build, f"torchvision_{name}", train=train)


_torchvision("resnet18")
_torchvision("mobilenet_v2")
_torchvision("mobilenet_v3_small", train=True)
_torchvision("squeezenet1_1")
_torchvision("shufflenet_v2_x0_5")
_torchvision("efficientnet_b0", train=True)
_torchvision("mnasnet0_5", dropout=0.2)
_torchvision("regnet_y_400mf")
_torchvision("googlenet", train=True, init_weights=False)
_torchvision("lraspp_mobilenet_v3_large", weights_backbone=None)
_torchvision("quantized_mobilenet_v2", quantize=False)


@entry
def torchvision_densenet() -> Case:
    from torchvision.models import DenseNet

    return Case(DenseNet(12, (3, 3, 3), 24, num_classes=10), (image(),))


@training
def torchvision_resnext() -> Case:
    from torchvision.models.resnet import Bottleneck, ResNet

    return Case(ResNet(Bottleneck, [1, 1, 1, 1], num_classes=10, groups=32, width_per_group=4), (image(),))


@training
def torchvision_vgg11_bn() -> Case:
    from torchvision.models import vgg

    with torch.device("meta"):  # its linear layers have 120 million weights: they get smaller ones
        model = vgg.vgg11_bn(weights=None, num_classes=10, init_weights=False)
    model.features = vgg.make_layers(vgg.cfgs["A"], batch_norm=True)
    for place, sizes in {0: (512 * 7 * 7, 32), 3: (32, 32), 6: (32, 10)}.items():
        model.classifier[place] = nn.Linear(*sizes)
    return Case(model, (image(32),))


@entry
def torchvision_swin_v2() -> Case:
    from torchvision.models import swin_transformer as swin

    model = swin.SwinTransformer(
        [4, 4],
        24,
        [2, 2],
        [2, 4],
        [4, 4],
        num_classes=10,
        block=swin.SwinTransformerBlockV2,
        downsample_layer=swin.PatchMergingV2,
    )
    return Case(model, (image(),))


@training
def torchvision_vit() -> Case:
    from torchvision.models import VisionTransformer

    return Case(VisionTransformer(32, 8, 2, 4, 32, 64, dropout=0.1, num_classes=10), (image(32),))


@entry
def torchvision_maxvit() -> Case:
    from torchvision.models.maxvit import MaxVit

    model = MaxVit(
        input_size=(64, 64),
        stem_channels=8,
        partition_size=2,
        block_channels=[8, 16],
        block_layers=[1, 1],
        head_dim=4,
        stochastic_depth_prob=0.1,
        num_classes=10,
    )
    return Case(model, (image(),))


@training
def torchvision_retinanet() -> Case:
    # In train mode: torchvision's own compiled operators, which eval mode needs, are missing beside a CPU torch.
    from torchvision.models.detection import RetinaNet
    from torchvision.models.detection.backbone_utils import resnet_fpn_backbone

    backbone = resnet_fpn_backbone(backbone_name="resnet18", weights=None, returned_layers=[3, 4], trainable_layers=5)
    model = RetinaNet(backbone, 4, min_size=64, max_size=64, anchor_generator=_anchors())
    boxes = [torch.tensor([[4.0, 4.0, 30.0, 40.0], [10.0, 8.0, 50.0, 60.0]]), torch.tensor([[2.0, 3.0, 20.0, 22.0]])]
    targets = [{"boxes": b, "labels": torch.arange(1, len(b) + 1)} for b in boxes]
    return Case(model, ([torch.rand(3, 64, 48), torch.rand(3, 56, 64)], targets))


def _anchors() -> nn.Module:
    from torchvision.models.detection.anchor_utils import AnchorGenerator

    return AnchorGenerator(((16,), (32,), (64,)), ((0.5, 1.0, 2.0),) * 3)


@entry
def torchvision_mc3() -> Case:
    from torchvision.models.video.resnet import BasicBlock, BasicStem, Conv3DNoTemporal, VideoResNet

    model = VideoResNet(BasicBlock, [Conv3DNoTemporal] * 4, [1, 1, 1, 1], BasicStem, num_classes=10)
    return Case(model, (torch.randn(1, 3, 4, 32, 32),))


@entry
def torchvision_raft_small() -> Case:
    from torchvision.models.optical_flow import raft_small

    model = raft_small(weights=None)
    return Case(model, (torch.randn(1, 3, 128, 128), torch.randn(1, 3, 128, 128)), {"num_flow_updates": 2})


# -- timm ---------------------------------------------------------------------------------------------------------


def _timm(name: str, size: int = 64, *, label: str | None = None, train: bool = False, **options: Any) -> None:
    def build() -> Case:
        import timm

        if not options.get("features_only"):
            options.setdefault("num_classes", 10)
        return Case(timm.create_model(name, pretrained=False, **options), (image(size),))

    entry(build, f"timm_{label or name}", train=train)


_timm("resnet10t", label="resnet10t_features", features_only=True)
_timm("res2net50_26w_4s", 32, layers=(1, 1, 1, 1))
_timm("vit_tiny_patch16_224", img_size=64, depth=3)
_timm("deit_tiny_distilled_patch16_224", img_size=64, depth=2, train=True)
_timm("beit_base_patch16_224", img_size=64, depth=2, embed_dim=48, num_heads=4)
_timm("eva02_tiny_patch14_224", img_size=56, size=56, depth=2)
_timm("swin_tiny_patch4_window7_224", img_size=64, window_size=4, embed_dim=24, depths=(2, 2), num_heads=(2, 4))
_timm("convnext_atto", drop_path_rate=0.2, train=True)
_timm("levit_128s", 224, train=True)
_timm("xcit_nano_12_p16_224", depth=2)
_timm("cait_xxs24_224", img_size=64, depth=3)
_timm("dla46_c")
_timm("inception_next_atto")
_timm("mobilevit_xxs")
_timm("ghostnet_050")
_timm("hrnet_w18_small")
_timm("test_byobnet", train=True)
_timm("test_nfnet", train=True)
_timm("test_mambaout")
_timm("coat_lite_tiny", img_size=64)


@entry
def timm_mlp_mixer() -> Case:
    from timm.models.mlp_mixer import MlpMixer

    return Case(MlpMixer(10, img_size=64, patch_size=16, num_blocks=3, embed_dim=48), (image(),))


# -- transformers -------------------------------------------------------------------------------------------------


def _transformers(
    model: str, config: str, inputs: Callable[[], dict[str, Any]], *, label: str, train: bool = False, **options: Any
) -> None:
    def build() -> Case:
        import transformers

        settings = getattr(transformers, config)(**options)
        return Case(getattr(transformers, model)(settings), (), inputs())

    entry(build, f"transformers_{label}", train=train)


def words() -> dict[str, Any]:
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[1, 5:] = 0
    return {"input_ids": tokens(), "attention_mask": mask}


def everything() -> dict[str, Any]:
    return {**words(), "output_hidden_states": True, "output_attentions": True}


def both_sides() -> dict[str, Any]:
    return {**words(), "decoder_input_ids": tokens(5)}


def pixels() -> dict[str, Any]:
    return {"pixel_values": image(32)}


_WIDTH = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 64,
}
_CAUSAL = {**_WIDTH, "num_key_value_heads": 2, "max_position_embeddings": 32, "pad_token_id": 0}

_transformers(
    "GPT2LMHeadModel", "GPT2Config", words, label="gpt2", n_embd=32, n_layer=2, n_head=4, n_positions=32, vocab_size=64
)
_transformers("LlamaForCausalLM", "LlamaConfig", words, label="llama", **_CAUSAL)
_transformers("Gemma2ForCausalLM", "Gemma2Config", words, label="gemma2", head_dim=8, sliding_window=4, **_CAUSAL)
_transformers(
    "MixtralForCausalLM",
    "MixtralConfig",
    words,
    label="mixtral",
    num_local_experts=4,
    output_router_logits=True,
    **_CAUSAL,
)
_transformers("MambaForCausalLM", "MambaConfig", words, label="mamba", state_size=4, **_WIDTH)
_transformers("GPTNeoXForCausalLM", "GPTNeoXConfig", words, label="gpt_neox", **_WIDTH)
_transformers(
    "BloomForCausalLM", "BloomConfig", words, label="bloom", hidden_size=32, n_layer=2, n_head=4, vocab_size=64
)
_transformers(
    "OPTForCausalLM", "OPTConfig", words, label="opt", ffn_dim=64, word_embed_proj_dim=16, train=True, **_WIDTH
)
_transformers("BertModel", "BertConfig", everything, label="bert", attn_implementation="eager", **_WIDTH)
_transformers("RobertaForMaskedLM", "RobertaConfig", words, label="roberta", train=True, **_WIDTH)
_transformers(
    "DistilBertForSequenceClassification",
    "DistilBertConfig",
    words,
    label="distilbert",
    dim=32,
    hidden_dim=64,
    n_layers=2,
    n_heads=4,
    vocab_size=64,
)
_transformers(
    "AlbertModel", "AlbertConfig", words, label="albert", embedding_size=16, **{**_WIDTH, "num_hidden_layers": 3}
)
_transformers(
    "DebertaV2Model",
    "DebertaV2Config",
    words,
    label="deberta_v2",
    relative_attention=True,
    pos_att_type=["c2p", "p2c"],
    **_WIDTH,
)
_transformers(
    "FunnelModel",
    "FunnelConfig",
    words,
    label="funnel",
    block_sizes=[1, 1],
    d_model=32,
    n_head=4,
    d_head=8,
    d_inner=64,
    vocab_size=64,
)
_transformers(
    "XLNetModel", "XLNetConfig", words, label="xlnet", d_model=32, n_layer=2, n_head=4, d_inner=64, vocab_size=64
)
_transformers(
    "T5ForConditionalGeneration",
    "T5Config",
    both_sides,
    label="t5",
    d_model=32,
    d_kv=8,
    d_ff=64,
    num_layers=2,
    num_heads=4,
    vocab_size=64,
    decoder_start_token_id=0,
)
_transformers(
    "BartForConditionalGeneration",
    "BartConfig",
    both_sides,
    label="bart",
    train=True,
    d_model=32,
    encoder_layers=2,
    decoder_layers=2,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=64,
    decoder_ffn_dim=64,
    vocab_size=64,
    max_position_embeddings=32,
)
_transformers("ViTForImageClassification", "ViTConfig", pixels, label="vit", image_size=32, patch_size=8, **_WIDTH)
_transformers(
    "SwinModel",
    "SwinConfig",
    pixels,
    label="swin",
    image_size=32,
    patch_size=4,
    embed_dim=16,
    depths=[2, 2],
    num_heads=[2, 4],
    window_size=4,
)
_transformers(
    "ConvNextModel",
    "ConvNextConfig",
    pixels,
    label="convnext",
    hidden_sizes=[16, 32],
    depths=[1, 2],
    num_stages=2,
    patch_size=4,
)
_transformers(
    "SegformerForSemanticSegmentation",
    "SegformerConfig",
    pixels,
    label="segformer",
    train=True,
    depths=[1, 1, 1, 1],
    hidden_sizes=[16, 32, 32, 32],
    decoder_hidden_size=32,
)


@entry
def transformers_clip() -> Case:
    from transformers import CLIPConfig, CLIPModel

    text = {**_WIDTH, "max_position_embeddings": 16, "eos_token_id": 2}
    vision = {**_WIDTH, "image_size": 32, "patch_size": 8}
    model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=16))
    return Case(model, (), {**words(), **pixels(), "return_loss": True})


@entry
def transformers_whisper() -> Case:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        vocab_size=64,
        num_mel_bins=8,
        max_source_positions=20,
        max_target_positions=16,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    return Case(
        WhisperForConditionalGeneration(config),
        (),
        {"input_features": torch.randn(2, 8, 40), "decoder_input_ids": tokens(4)},
    )


@training
def transformers_wav2vec2() -> Case:
    from transformers import Wav2Vec2Config, Wav2Vec2Model

    config = Wav2Vec2Config(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        conv_dim=(16, 16),
        conv_stride=(5, 4),
        conv_kernel=(10, 8),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=2,
        apply_spec_augment=False,
    )
    return Case(Wav2Vec2Model(config), (torch.randn(2, 400),))


@entry
def transformers_perceiver() -> Case:
    from transformers import PerceiverConfig, PerceiverModel

    config = PerceiverConfig(
        num_latents=8,
        d_latents=16,
        d_model=16,
        num_blocks=2,
        num_self_attends_per_block=2,
        num_self_attention_heads=4,
        num_cross_attention_heads=4,
    )
    return Case(PerceiverModel(config), (), {"inputs": torch.randn(2, 10, 16)})


class Generation(nn.Module):
    """A language model inside a module that writes text with it: every layer runs once for each new token."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, **options: Any) -> Any:
        return self.model.generate(input_ids, **options)  # type: ignore[operator]


@entry
def transformers_llama_generate() -> Case:
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**_CAUSAL, eos_token_id=None))
    options = {"max_new_tokens": 3, "do_sample": False, "return_dict_in_generate": True, "output_scores": True}
    return Case(Generation(model), (tokens(4),), {"attention_mask": torch.ones(2, 4, dtype=torch.long), **options})
