"""Stage ``report``: the run in the terminal, as ``report.html`` and as ``report.json``."""

from __future__ import annotations

from cadenza.core.config import StrictConfig
from cadenza.core.files import copy_file, read_json
from cadenza.evaluation.report import write_report
from cadenza.evaluation.report_terminal import print_report
from cadenza.pipelines.stages import Figures, Stage, StageContext


class ReportConfig(StrictConfig):
    """``notes``: sentences the reader must see."""

    notes: tuple[str, ...] = ()


class Report(Stage[ReportConfig]):
    """Artifact: ``report.html``, ``report.json``; copies of both are put into the run's folder. It finds what it shows
    in the run's folder; its inputs say which stages make it stale when they are made again."""

    Config = ReportConfig
    open_inputs = True
    copies = ("report.html", "report.json")

    def run(self, context: StageContext) -> Figures:
        from cadenza.observe import run_info  # SQLAlchemy

        info = run_info(
            context.database, context.run_id, context.run_dir.name, context.seed, self.config.notes
        )
        own = tuple(stage for stage in info.stages if stage.name != context.name)
        info = info.model_copy(update={"stages": own})
        report = write_report(context.run_dir, context.out, info)
        for name in self.copies:
            copy_file(context.out / name, context.run_dir / name)
        console = context.progress.results()
        if console is not None:
            print_report(report, console, page=context.run_dir / "report.html")
        return {"sections": len(read_json(context.out / "report.json"))}
