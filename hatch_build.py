"""The build hook with which pip compiles the hot path (`build_native.py`)."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class NativeBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Compiles in place, and adds the compiled modules to a wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compiles; without a compiler the package stays plain Python, with a warning.

        With `CATENARY_UNCOMPILED=1` an editable installation is left as it is, compiled or not.
        """
        if version == "editable" and os.environ.get("CATENARY_UNCOMPILED") == "1":
            return
        root = Path(self.root)
        sys.path.insert(0, str(root))
        import build_native

        try:
            # An image builder compiles in a layer of its own, before the rest of the source is
            # copied.
            if not build_native.is_fresh(root):
                build_native.build(root)
        except (Exception, SystemExit) as error:  # tools differ in how they miss a compiler
            build_native.remove(root)
            self.app.display_warning(f"catenary runs uncompiled, and slower: {error}")
            return
        if version != "editable":
            build_data["pure_python"] = False
            build_data["infer_tag"] = True
            for name in (*build_native.outputs(root), build_native.RECORD):
                build_data["force_include"][str(root / name)] = build_native.installed(name)
