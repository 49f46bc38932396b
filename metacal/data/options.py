"""The options of the data of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from metacal.options import option

__all__ = ["DataConfig"]


@dataclass
class DataConfig:
    """Where the images come from and how they are split, batched and augmented.

    Sizes: a float in (0, 1) is a fraction, an int >= 1 a count.
    """

    name: str = option("digits", "digits, npz, folder, shards, cifar10, cifar100, fashion_mnist, mnist or svhn")
    path: str | None = option(None, "the file or folder")
    download: bool = option(False, "fetch what torchvision can fetch")
    image_size: int | None = option(None, "folder, shards: resize to this", low=1)
    train_size: Any = option(None, "a stratified subset for train and meta together; null: all")
    meta_from: str = option(
        "train",
        "the meta images: a part of train that is not trained on, the val images, or folds of train in turn",
        choices=("train", "val", "folds"),
    )
    meta_size: Any = option(0.1, "meta_from=train: the meta split, of train and meta together")
    meta_folds: int = option(10, "meta_from=folds: the parts of train that are meta, one an epoch, in turn", low=2)
    meta_augment: bool = option(False, "crop and mirror meta images as training images are; false: as they are")
    val_size: Any = option(0.1, "of the labelled pool")
    test_size: Any = option(0.2, "where the source has no test set")
    split_seed: int | None = option(0, "the same splits for every training seed; null: those of the run's seed", low=0)
    fold_meta_into_train: str = option("auto", "the meta split goes back to train: auto (if not needed), true or false")
    batch_size: int = option(128, "images in a training step", low=1)
    meta_batch_size: int | None = option(
        None, "images in an outer step; null: the meta split, 2048 at most, large ones fewer", low=1
    )
    crop_padding: int = option(0, "pixels that images are padded by before a random crop", low=0)
    flip: bool = option(False, "random mirror images")
    mixup: float = option(0.0, "alpha of the Beta distribution of mixup's weights; 0: none", low=0)
    normalize: str = option(
        "auto", "auto: per channel, from the training images or mean and std", choices=("auto", "none")
    )
    mean: list[float] | None = option(None, "per channel, of pixels in [0, 1]; given together with std")
    std: list[float] | None = option(None, "per channel, of pixels in [0, 1]; given together with mean")
    storage: str = option(
        "auto", "one tensor on the device, a DataLoader, or by size", choices=("auto", "memory", "stream")
    )
    shuffle_buffer: int = option(8192, "shards: images by which one may be moved from its place in its shard", low=1)
    workers: int = option(2, "processes that read image files or stream", low=0)
