"""The baseline that offloads the largest values of layers first, until the step fits; what is left is kept."""

from __future__ import annotations

from moec.compiler.partition import OFFLOAD, Choices
from moec.passes.cache_search import CacheSearch, Found


class LargestFirst(CacheSearch):
    """In the place of the solver's search."""

    def run(self) -> Found:
        """The fewest of the largest values, of early layers before late ones."""
        hbm = self._plan.hbm_bytes
        assert hbm is not None
        values = [
            (-value.bytes, number, call.path, value.name)
            for template, problem in zip(self._templates, self.problems, strict=False)
            for number, call in enumerate(template.calls)
            for value in problem.values
            if value.needed and value.may_offload
        ]
        values.sort()
        least, most = 0, len(values)
        found = self._offloaded(values)
        while least < most:
            middle = (least + most) // 2
            tried = self._offloaded(values[:middle])
            if tried.memory.peak <= hbm:
                found, most = tried, middle
            else:
                least = middle + 1
        return found

    def _offloaded(self, values: list[tuple[int, int, str, str]]) -> Found:
        names: dict[str, list[str]] = {call.path: [] for template in self._templates for call in template.calls}
        for _, _, path, name in values:
            names[path].append(name)
        choices = {path: Choices(by_name=tuple((name, OFFLOAD) for name in own)) for path, own in names.items()}
        return self.replay(choices, Choices(), 0.0)
