"""Puts the CUDA sources, which lie beside the package, into it when a wheel is built.

They are no package of setuptools: a folder elsewhere in `package-dir` would make editable installs import by
a hook, where mypy and editors do not find the package.
"""

from pathlib import Path

from setuptools.command.build_py import build_py


class BuildPy(build_py):
    def kernels(self) -> dict[str, str]:
        """The source of each file to build."""
        return {f"{self.build_lib}/cupy_fp8/{source.as_posix()}": str(source)
                for source in sorted(Path("kernels_cu").rglob("*.cu*"))}

    def run(self) -> None:
        super().run()
        for built, source in {} if self.editable_mode else self.kernels().items():
            self.mkpath(str(Path(built).parent))
            self.copy_file(source, built)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        return [*super().get_outputs(include_bytecode), *self.kernels()]

    def get_output_mapping(self) -> dict[str, str]:
        return super().get_output_mapping() | self.kernels()

    def get_source_files(self) -> list[str]:
        return [*super().get_source_files(), *self.kernels().values(), Path(__file__).name]
