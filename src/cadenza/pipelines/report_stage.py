"""Stage ``report``: the run in the terminal, as ``report.html`` and as ``report.json``."""

from __future__ import annotations

from cadenza.core import machine
from cadenza.core.config import StrictConfig
from cadenza.core.files import copy_file, read_json
from cadenza.evaluation.report import write_report
from cadenza.evaluation.report_inputs import RunInfo, StageInfo
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
        run = context.database.run(context.run_id)
        stages = context.database.stages(context.run_id)
        where = machine.describe()
        info = RunInfo(
            name=context.run_dir.name,
            recipe=run.name if run else "",
            seeds=(context.seed,),
            wall_s=sum((s.finished or s.started) - s.started for s in stages),
            command=f"cadenza train {run.name}" if run else "",
            config=run.recipe if run else {},
            machine=where,
            stages=tuple(
                StageInfo(
                    name=s.name,
                    status="done" if s.status == "finished" else s.status,
                    wall_s=s.finished - s.started if s.finished else None,
                    detail={k: v for k, v in (s.figures or {}).items() if isinstance(v, (int, float, str))},
                )
                for s in stages
                if s.name != context.name
            ),
            notes=self.config.notes,
        )
        report = write_report(context.run_dir, context.out, info)
        for name in self.copies:
            copy_file(context.out / name, context.run_dir / name)
        console = context.progress.results()
        if console is not None:
            print_report(report, console, page=context.run_dir / "report.html")
        return {"sections": len(read_json(context.out / "report.json"))}
