"""The place of a kernel backend in FlyDSL. It is not part of this version: importing this module says so."""

raise ImportError(
    "this version of mori has no FlyDSL backend yet, installing the extra mori-ep[flydsl] does not change that; "
    'kernel_backend="hip" or MORI_V2_KERNEL_BACKEND=hip takes the native one, which needs no FlyDSL'
)
