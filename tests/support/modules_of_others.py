"""Modules that other libraries define, made small, each with a batch and a loss.

``MODULES``: by a name that begins with its package, a function that makes (module, batch, loss).
A package is imported when one of its modules is made.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

CLASSES = 10
SIZE = 32  # pixels
VIT = {"img_size": SIZE, "patch_size": 8, "depth": 3, "embed_dim": 32, "num_heads": 2}


def declare_torchvision_operators() -> torch.library.Library | None:
    """Declare the operators of torchvision's C library where it cannot be loaded, as with a PyTorch
    for the CPU from another index. The models here call none of them, and torchvision refuses to be
    imported without them. The declarations last as long as what is returned.
    """
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent
    with contextlib.suppress(OSError):
        for path in folder.glob("_C*"):
            torch.ops.load_library(path)
            return None
    text = (folder / "_meta_registrations.py").read_text()
    names = {"nms", *re.findall(r"torchvision::(\w+)", text)}
    names.update(re.findall(r'register_meta\("(\w+)"', text))
    library = torch.library.Library("torchvision", "DEF")
    for name in sorted(names):
        library.define(f"{name}(Tensor x) -> Tensor")
    return library


# Before transformers is imported, which imports torchvision where it is installed.
_declared = declare_torchvision_operators()


def package(name: str) -> Any:
    return importlib.import_module(name)


# Batches and losses.


def pictures(rows: int = 4, channels: int = 3, size: int = SIZE) -> torch.Tensor:
    return torch.randn(rows, channels, size, size)


def labels(rows: int = 4) -> torch.Tensor:
    return torch.randint(0, CLASSES, (rows,))


def classes_of(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def own_loss(model, batch):
    return model(**batch) if isinstance(batch, dict) else model(batch)


def noise_of(model, batch):
    """The error of a diffusion model, whose last tensor in the batch is the noise."""
    *inputs, noise = batch
    return F.mse_loss(model(*inputs).sample, noise)


def steps(rows: int = 4) -> torch.Tensor:
    return torch.randint(0, 1000, (rows,))


# timm and torchvision

TIMM: dict[str, tuple[str, dict]] = {
    "ViT": ("vit_tiny_patch16_224", VIT),
    "DeiT": ("deit_tiny_distilled_patch16_224", VIT),
    "CaiT": ("cait_xxs24_224", VIT),
    "XCiT": ("xcit_nano_12_p8_224", {"img_size": SIZE, **{k: VIT[k] for k in list(VIT)[2:]}}),
    "BEiT": ("beitv2_base_patch16_224", VIT),
    "Swin": (
        "swin_tiny_patch4_window7_224",
        {
            "img_size": SIZE,
            "window_size": 4,
            "embed_dim": 16,
            "depths": (2, 2),
            "num_heads": (1, 2),
        },
    ),
    "SwinV2": (
        "swinv2_tiny_window8_256",
        {
            "img_size": SIZE,
            "window_size": 4,
            "embed_dim": 16,
            "depths": (2, 2),
            "num_heads": (1, 2),
        },
    ),
    "ConvNeXt": ("convnext_atto", {"depths": (1, 1, 2, 1), "dims": (8, 16, 24, 32)}),
    "ConvNeXtV2": ("convnextv2_atto", {"depths": (1, 1, 2, 1), "dims": (8, 16, 24, 32)}),
    "ResNeXt": ("resnext50_32x4d", {"layers": (1, 1, 1, 1)}),
    "SE-ResNet": ("seresnet50", {"layers": (1, 1, 1, 1)}),
    "DenseNet": ("densenet121", {"block_config": (2, 2, 2, 2), "growth_rate": 8}),
    "MobileNetV4": ("mobilenetv4_conv_small_050", {}),
    "RegNet": ("regnetx_002", {}),
    "PVT": ("pvt_v2_b0", {"depths": (1, 1, 1, 1)}),
    "NaFlexViT": ("naflexvit_base_patch16_gap", {k: VIT[k] for k in list(VIT)[2:]}),
}


def of_timm(name: str):
    kind, settings = TIMM[name]
    model = package("timm").create_model(kind, num_classes=CLASSES, **settings)
    return model, (pictures(), labels()), classes_of


def of_torchvision(name: str):
    model = getattr(package("torchvision.models"), name)(weights=None, num_classes=CLASSES)
    return model, (pictures(), labels()), classes_of


def raft():
    model = package("torchvision.models").optical_flow.raft_small()
    batch = pictures(2, size=128), pictures(2, size=128), pictures(2, 2, 128)

    def error(model, batch):
        flows = model(*batch[:2], num_flow_updates=1)
        return (flows[0] - batch[2]).abs().mean()

    return model, batch, error


def torchvision_vit():
    kind = package("torchvision.models").VisionTransformer
    sizes = {"num_layers": 3, "num_heads": 2, "hidden_dim": 32, "mlp_dim": 64}
    model = kind(SIZE, 8, **sizes, num_classes=CLASSES, dropout=0.1)
    return model, (pictures(), labels()), classes_of


# diffusers

HEADS = {"num_attention_heads": 2, "attention_head_dim": 8}
UNET = {
    "sample_size": 8,
    "in_channels": 4,
    "out_channels": 4,
    "layers_per_block": 1,
    "block_out_channels": (16, 32),
    "norm_num_groups": 4,
}


def of_diffusers(kind: str, batch: Callable[[], tuple], **settings):
    return getattr(package("diffusers"), kind)(**settings), batch(), noise_of


def latents(rows: int = 4, channels: int = 4) -> torch.Tensor:
    return torch.randn(rows, channels, 8, 8)


def flux():
    settings = {"num_layers": 2, "num_single_layers": 2, "axes_dims_rope": (4, 4, 8)}
    settings |= {"attention_head_dim": 16, "num_attention_heads": 2, "joint_attention_dim": 24}
    model = package("diffusers").FluxTransformer2DModel(
        in_channels=4, pooled_projection_dim=12, guidance_embeds=False, **settings
    )
    batch = {
        "hidden_states": torch.randn(4, 16, 4),
        "encoder_hidden_states": torch.randn(4, 5, 24),
        "pooled_projections": torch.randn(4, 12),
        "timestep": torch.rand(4),
        "noise": torch.randn(4, 16, 4),
    }

    def error(model, batch):
        inputs = {name: value for name, value in batch.items() if name != "noise"}
        places = {"img_ids": torch.zeros(16, 3), "txt_ids": torch.zeros(5, 3)}
        return F.mse_loss(model(**inputs, **places).sample, batch["noise"])

    return model, batch, error


def autoencoder():
    model = package("diffusers").AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        sample_size=16,
    )

    def error(model, batch):
        posterior = model.encode(batch).latent_dist
        return F.mse_loss(model.decode(posterior.sample()).sample, batch) + posterior.kl().mean()

    return model, pictures(size=16), error


# x-transformers, vit-pytorch


def decoder(**settings):
    of = package("x_transformers")
    layers = of.Decoder(dim=32, depth=3, heads=2, attn_dim_head=16, **settings)
    model = of.TransformerWrapper(num_tokens=64, max_seq_len=32, attn_layers=layers)
    return of.AutoregressiveWrapper(model), torch.randint(0, 64, (4, 17)), own_loss


def of_vit_pytorch(module: str, kind: str, size: int = SIZE, **settings):
    found = getattr(package(f"vit_pytorch.{module}"), kind)
    return found(num_classes=CLASSES, **settings), (pictures(size=size), labels()), classes_of


SMALL_VIT = {"image_size": SIZE, "patch_size": 8, "dim": 32, "depth": 3, "heads": 2, "mlp_dim": 64}

# MONAI, segmentation_models_pytorch, open_clip


def of_monai(kind: str, **settings):
    model = getattr(package("monai.networks.nets"), kind)(
        spatial_dims=2, in_channels=1, out_channels=2, **settings
    )
    return model, (pictures(channels=1), torch.randint(0, 2, (4, SIZE, SIZE))), classes_of


def dice():
    model = package("monai.networks.nets").UNet(
        spatial_dims=3, in_channels=1, out_channels=2, channels=(4, 8, 16), strides=(2, 2)
    )
    of_pixels = package("monai.losses").DiceCELoss(to_onehot_y=True, softmax=True)
    size = (4, 1, 16, 16, 16)
    batch = torch.randn(size), torch.randint(0, 2, size)
    return model, batch, lambda model, batch: of_pixels(model(batch[0]), batch[1])


def of_smp(kind: str):
    model = getattr(package("segmentation_models_pytorch"), kind)(
        encoder_name="resnet18", encoder_weights=None, classes=5
    )
    return model, (pictures(4, size=64), torch.randint(0, 5, (4, 64, 64))), classes_of


def clip(kind: str):
    of = package("open_clip")
    vision = {"image_size": SIZE, "layers": 3, "width": 32, "head_width": 16, "patch_size": 8}
    text = {"context_length": 12, "vocab_size": 64, "width": 32, "heads": 2, "layers": 3}
    model = getattr(of, kind)(embed_dim=16, vision_cfg=vision, text_cfg=text)

    def contrast(model, batch):
        return of.ClipLoss()(*model(*batch)[:3])

    return model, (pictures(), torch.randint(1, 63, (4, 12))), contrast


def mamba():
    of = package("transformers")
    config = of.MambaConfig(vocab_size=64, hidden_size=32, state_size=4, num_hidden_layers=5)
    tokens = torch.randint(0, 64, (4, 16))
    batch = {"input_ids": tokens, "labels": tokens}
    return of.MambaForCausalLM(config), batch, lambda model, batch: model(**batch).loss


CROSS = {"cross_attention_dim": 24, "attention_head_dim": 8}
MODULES: dict[str, Callable[[], tuple]] = {
    **{f"timm {name}": partial(of_timm, name) for name in TIMM},
    **{
        f"torchvision {name}": partial(of_torchvision, name)
        for name in ("resnet18", "mobilenet_v3_small", "shufflenet_v2_x0_5", "squeezenet1_1")
    },
    "torchvision RAFT": raft,
    "torchvision ViT": torchvision_vit,
    "diffusers UNet": partial(
        of_diffusers,
        "UNet2DModel",
        lambda: (latents(), steps(), latents()),
        **UNET,
        attention_head_dim=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    ),
    "diffusers UNet with text": partial(
        of_diffusers,
        "UNet2DConditionModel",
        lambda: (latents(), steps(), torch.randn(4, 7, 24), latents()),
        **UNET,
        **CROSS,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    ),
    "diffusers DiT": partial(
        of_diffusers,
        "DiTTransformer2DModel",
        lambda: (latents(), steps(), labels(), latents(channels=8)),
        **HEADS,
        in_channels=4,
        out_channels=8,
        num_layers=3,
        sample_size=8,
        norm_num_groups=4,
    ),
    "diffusers SD3": partial(
        of_diffusers,
        "SD3Transformer2DModel",
        lambda: (latents(), torch.randn(4, 5, 24), torch.randn(4, 12), steps(), latents()),
        **HEADS,
        sample_size=8,
        in_channels=4,
        out_channels=4,
        num_layers=3,
        joint_attention_dim=24,
        caption_projection_dim=16,
        pooled_projection_dim=12,
        pos_embed_max_size=8,
    ),
    "diffusers Flux": flux,
    "diffusers AutoencoderKL": autoencoder,
    "x_transformers plain": decoder,
    "x_transformers rotary": partial(decoder, rotary_pos_emb=True, ff_glu=True, use_rmsnorm=True),
    "x_transformers flash": partial(decoder, attn_flash=True),
    "x_transformers one key": partial(decoder, attn_kv_heads=1),
    "x_transformers shifted": partial(decoder, shift_tokens=1),
    "x_transformers memories": partial(decoder, attn_num_mem_kv=4),
    "x_transformers layer_dropout": partial(decoder, layer_dropout=0.1),
    "vit_pytorch ViT": partial(of_vit_pytorch, "vit", "ViT", **SMALL_VIT, dropout=0.1),
    "vit_pytorch SimpleViT": partial(of_vit_pytorch, "simple_vit", "SimpleViT", **SMALL_VIT),
    "vit_pytorch DeepViT": partial(of_vit_pytorch, "deepvit", "DeepViT", **SMALL_VIT),
    "vit_pytorch CaiT": partial(
        of_vit_pytorch, "cait", "CaiT", **SMALL_VIT, cls_depth=2, layer_dropout=0.05
    ),
    "vit_pytorch RvT": partial(of_vit_pytorch, "rvt", "RvT", **SMALL_VIT),
    "monai AttentionUnet": partial(of_monai, "AttentionUnet", channels=(8, 16), strides=(2,)),
    "monai SegResNet": partial(
        of_monai, "SegResNet", init_filters=8, blocks_down=(1, 1, 1), blocks_up=(1, 1)
    ),
    "monai BasicUNet": partial(of_monai, "BasicUNet", features=(8, 8, 16, 16, 32, 8)),
    "monai UNet, Dice": dice,
    "segmentation_models_pytorch Unet": partial(of_smp, "Unet"),
    "segmentation_models_pytorch FPN": partial(of_smp, "FPN"),
    "segmentation_models_pytorch Segformer": partial(of_smp, "Segformer"),
    "open_clip CLIP": partial(clip, "CLIP"),
    "open_clip CustomTextCLIP": partial(clip, "CustomTextCLIP"),
    "transformers Mamba": mamba,
}
