"""MORI-IO is not part of this package."""

raise ImportError(
    "mori.io: MORI-IO (point-to-point transfer of tensors) is out of scope of this package, which has expert-parallel "
    "dispatch and combine only; the build option BUILD_IO is accepted and changes nothing"
)
