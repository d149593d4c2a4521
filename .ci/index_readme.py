"""Makes the links of the README absolute, for the page of the project on a package index.

hatchling calls `IndexReadme` in each build. The release workflow sets TORCHREPRO_REPOSITORY to the
address of the repository; without it the README is used as it is, and no address is published.
"""

import os
import re
from pathlib import Path, PurePosixPath
from urllib.parse import urljoin

from hatchling.metadata.plugin.interface import MetadataHookInterface

VARIABLE = "TORCHREPRO_REPOSITORY"
PICTURES = (".svg", ".png", ".jpg")
_TARGET = re.compile(r'(?<=\]\()[^)\s]+(?=\))|(?<=src=")[^"]+(?=")|(?<=srcset=")[^"]+(?=")')
"""The target of a link or picture, in Markdown and in HTML."""


class IndexReadme(MetadataHookInterface):
    """Adds the README, and the addresses of the project, to the metadata of a build."""

    PLUGIN_NAME = "custom"

    def update(self, metadata):
        """Set `readme`, and `urls` if the address of the repository is known."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        repository = os.environ.get(VARIABLE, "").rstrip("/")
        if repository:
            tag = f"v{metadata['version']}"
            text = with_absolute_links(text, repository, tag)
            metadata["urls"] = {
                "Source": repository,
                "Documentation": f"{repository}/blob/{tag}/docs/index.md",
                "Changelog": f"{repository}/blob/{tag}/CHANGELOG.md",
                "Issues": f"{repository}/issues",
            }
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def with_absolute_links(text, repository, tag):
    """Return the README with each relative link as an address at a tag of the repository."""

    def absolute(found):
        is_picture = PurePosixPath(found[0]).suffix in PICTURES
        page = f"{repository}/{'raw' if is_picture else 'blob'}/{tag}/README.md"
        return urljoin(page, found[0])

    return _TARGET.sub(absolute, text)
