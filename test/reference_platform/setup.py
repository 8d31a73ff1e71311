"""Adds the .pth file that pyproject.toml cannot express.

A data file lands below ``sys.prefix``, so naming site-packages relative to the prefix puts the
file where Python reads .pth files. It runs two imports at interpreter start: see
``dsv4_reference_platform.torchvision_shim`` and ``dsv4_reference_platform.sgl_kernel_shim``.
"""

import os
import sysconfig

from setuptools import Distribution, setup


class DistributionWithData(Distribution):
    """Editable installs ask ``has_data``, which setuptools itself never defines."""

    def has_data(self) -> bool:
        return self.has_data_files()


site_packages = os.path.relpath(sysconfig.get_path("purelib"), sysconfig.get_path("data"))
setup(
    distclass=DistributionWithData,
    data_files=[(site_packages, ["dsv4_reference_platform.pth"])],
)
