"""What the tests of this folder share."""

from kept_programs import _folder, kept_programs

__all__ = ["_folder", "kept_programs"]
