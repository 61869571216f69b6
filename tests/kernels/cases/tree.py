"""Small inputs of the ops of ``graphspec.kernels.tree``, odd sizes included, by name; drawn on the CPU."""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from graphspec.kernels.op import Case
from graphspec.kernels.sampling.topk import stable_topk
from graphspec.kernels.tree.commit_rows import RING_HEADER
from graphspec.kernels.tree.draft_window import LIVE
from graphspec.kernels.tree.mail_apply import JOIN_WORDS
from graphspec.kernels.tree.tree_build import tree_build as build_tree
from graphspec.kernels.tree.tree_walk import ROW_LIVE


def commit_case(
    generator: torch.Generator, lanes: int, nodes: int, width: int, features: int = 0, lookback: int = 0, history: int = 0, vocab: int = 0,
    capacity: int = 0, append: bool = False,
) -> Case:  # fmt: skip
    """Rows in any order, some with an empty run; from three lanes on, the last two are padded and share the dummy row."""
    rows, live = lanes + 2, lanes if lanes < 3 else lanes - 2
    capacity = capacity or width * (1 + append)

    def draw(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    row = torch.randperm(rows - 1, generator=generator)[:lanes]
    row[live:] = rows - 1
    status, length = draw(0, 5, rows), draw(0, (min(width, nodes) if append else width) + 1, lanes)
    length[live:] = 0
    outcome = torch.where(torch.arange(lanes) < live, draw(0, 5, lanes), status[row])
    path = torch.cat((torch.zeros(lanes, 1, dtype=torch.int64), draw(0, nodes, lanes, width - 1).sort(-1).values), 1)

    def feature(*shape: int) -> Tensor | None:
        return torch.randn(*shape, features, generator=generator) if features else None

    return {
        "lane_row_B": row,
        "sample_BN": draw(0, vocab or 50, lanes, nodes),
        "path_BA": path,
        "accept_len_B": length,
        "outcome_B": outcome,
        "feature_BNF": feature(lanes, nodes),
        "cycle_1": draw(0, 9, 1),
        "ring_ZBJ": draw(-9, 0, 3, lanes, width + RING_HEADER),
        "window_token_RAc": draw(0, 50, rows, capacity),
        "window_len_R": draw(1, capacity - width * append + 1, rows),
        "seq_len_R": draw(0, max(history - width, 9), rows),
        "budget_R": draw(0, 99, rows),
        "status_R": status,
        "window_feature_RAcF": feature(rows, capacity),
        "lookback_token_RY": draw(0, 50, rows, lookback) if lookback else None,
        "lookback_feature_RYF": feature(rows, lookback) if lookback else None,
        "history_RL": draw(0, 50, rows, history) if history else None,
        "output_count_RV": draw(0, 9, rows, vocab).to(torch.int32) if vocab else None,
        "append": append,
    }


def candidate_pool(generator: torch.Generator, lanes: int, num_steps: int, topk: int, vocab: int = 50, coarse: bool = True) -> Case:
    """Scores, tokens and parents as from a draft of ``num_steps`` levels of ``topk`` beams; siblings have distinct tokens."""

    def increments(rows: int) -> Tensor:
        drop = -torch.rand(lanes, rows, topk, generator=generator).sort(-1).values
        return drop.mul(4).round() / 4 if coarse else drop

    def tokens(rows: int) -> Tensor:
        return torch.rand(lanes, rows, vocab, generator=generator).argsort(-1)[..., :topk]

    score, token = increments(1)[:, 0], tokens(1)[:, 0]
    scores, tokens_list, parents = [score], [token], [torch.full_like(token, -1)]
    beam_pool, beam_score, offset = torch.arange(topk).expand(lanes, topk), score, topk
    for _ in range(num_steps - 1):
        level = (beam_score[..., None] + increments(topk)).flatten(1)
        scores.append(level)
        tokens_list.append(tokens(topk).flatten(1))
        parents.append(beam_pool.repeat_interleave(topk, 1))
        beam_score, chosen = stable_topk(level, topk)
        beam_pool, offset = chosen + offset, offset + topk * topk
    return {"score_BM": torch.cat(scores, 1), "token_BM": torch.cat(tokens_list, 1), "parent_BM": torch.cat(parents, 1)}


def window_case(generator: torch.Generator, lanes: int, vocab: int = 50) -> Case:
    """Lanes over more rows than there are lanes; two padded ones share the dummy row where there is room."""
    rows, width = lanes + 2, 4
    row = torch.randperm(rows - 1, generator=generator)[:lanes]
    row[max(lanes - 2, 1) :] = rows - 1
    return {
        "lane_row_B": row,
        "window_token_RAc": torch.randint(0, vocab, (rows, width), generator=generator),
        "window_len_R": torch.randint(0, width + 1, (rows,), generator=generator),
    }


def node_slots(lanes: int, num_nodes: int, num_words: int) -> Case:
    """The slots of the nodes, filled with values that must be overwritten."""
    shape = (lanes, num_nodes)
    slots = {name: torch.full(shape, -7_777) for name in ("node_token_BN", "node_parent_BN", "node_depth_BN")}
    return {**slots, "node_ancestors_BNX": torch.full((*shape, num_words), -7_777)}


def chain_layout(generator: Generator) -> list[Case]:
    def case(lanes: int, nodes: int, words: int) -> Case:
        score = -torch.rand(lanes, nodes - 1, generator=generator)
        score[:, 2::3], score[:, 3::4] = -torch.inf, torch.nan
        token = torch.randint(0, 50, (lanes, nodes - 1), generator=generator)
        drafted = nodes > 1
        return {
            "score_BM": score if drafted else None,
            "token_BM": token if drafted else None,
            **window_case(generator, lanes),
            **node_slots(lanes, nodes, words),
        }

    return [case(3, 8, 1), case(4, 65, 2), case(2, 1, 1), case(1, 2, 1), case(2, 128, 2)]


def commit_rows(generator: Generator) -> list[Case]:
    past_the_end = commit_case(generator, 2, 4, 3, history=7)
    past_the_end["seq_len_R"].fill_(5)
    return [
        commit_case(generator, 5, 6, 4, features=7),
        commit_case(generator, 4, 9, 3, features=5, lookback=2, vocab=11),
        commit_case(generator, 3, 8, 8, history=30),
        commit_case(generator, 1, 1, 1),
        commit_case(generator, 7, 4, 4, features=3, lookback=3),
        past_the_end,
        commit_case(generator, 5, 6, 3, features=7, capacity=9),
        commit_case(generator, 6, 1, 4, features=5, capacity=11, append=True),
        commit_case(generator, 4, 5, 3, vocab=11, append=True),
    ]


def draft_level(generator: Generator) -> list[Case]:
    def integers(minimum: int, maximum: int, *shape: int) -> Tensor:
        return torch.randint(minimum, maximum, shape, generator=generator)

    def case(lanes: int, level: int, steps: int, topk: int, num_words: int, beams: bool = True) -> Case:
        rows, pool = topk if level > 1 else 1, topk + (steps - 1) * topk**2
        increment = -integers(0, 6, lanes, rows, topk).sort(-1).values / 2
        increment[-1, -1, topk // 2 :] = -torch.inf
        increment[0, 0, -1] = torch.nan
        score = -integers(0, 9, lanes, pool) / 2
        score[:, ::3] = -torch.inf
        status = integers(0, 2, lanes + 1)
        status[0] = LIVE
        begin, count = (topk + (level - 3) * topk**2, topk**2) if level > 2 else (0, topk)
        index = begin + torch.rand(lanes, count, generator=generator).argsort(-1)[:, :topk]
        sequence = integers(0, 99, lanes + 1)
        sequence[status != LIVE] = -(2**40)
        return {
            "increment_BEK": increment, "next_BEK": integers(0, 50, lanes, rows, topk), "level": level, "beams": beams, "shift": level % 2,
            "lane_row_B": torch.randperm(lanes + 1, generator=generator)[:lanes], "status_R": status, "seq_len_R": sequence,
            "candidate_score_BM": score, "candidate_token_BM": integers(0, 50, lanes, pool),
            "candidate_parent_BM": integers(-1, pool, lanes, pool),
            "beam_token_BK": integers(-1, 50, lanes, topk), "beam_index_BK": index, "beam_source_BK": integers(0, topk, lanes, topk),
            "beam_path_BKS": integers(-1, 50, lanes, topk, steps), "beam_ancestors_BKX": integers(0, 2**62, lanes, topk, num_words),
            "beam_valid_BK": integers(0, 2, lanes, topk).bool(), "beam_slot_BK": integers(0, 99, lanes, topk),
            "beam_position_BK": integers(0, 99, lanes, topk), "beam_end_B": integers(0, 99, lanes),
            "next_position_B": integers(0, 99, lanes),
        }  # fmt: skip

    return [
        case(1, 1, 1, 1, 1, beams=False), case(3, 2, 4, 3, 1), case(2, 1, 3, 8, 1), case(3, 3, 4, 8, 2), case(4, 4, 5, 1, 1),
        case(2, 3, 3, 4, 1, beams=False), case(1, 2, 3, 33, 2),
    ]  # fmt: skip


def draft_topk(generator: Generator) -> list[Case]:
    def case(lanes: int, rows: int, vocab: int, topk: int, mapped: bool, noisy: bool) -> Case:
        logits = torch.randn(lanes, rows, vocab, generator=generator).mul(3).round(decimals=1)
        logits[0, 0, vocab // 2 :] = torch.nan
        logits[-1, -1, 0] = torch.inf
        return {
            "logits_BTVd": logits,
            "topk": topk,
            "target_token_Vd": torch.randperm(3 * vocab, generator=generator)[:vocab] if mapped else None,
            "seed_B": torch.randint(-(2**62), 2**62, (lanes,), generator=generator) if noisy else None,
            "position_B": torch.randint(0, 5000, (lanes,), generator=generator) if noisy else None,
            "temperature_B": torch.arange(lanes) * 0.7 if noisy else None,
        }

    return [case(1, 1, 1, 1, False, False), case(3, 2, 37, 4, True, True), case(2, 3, 129, 8, False, True), case(2, 1, 40, 20, True, False)]


def draft_window(generator: Generator) -> list[Case]:
    def case(lanes: int, width: int, features: int, lookback: int, shift: int, num_words: int, spare: int = 0) -> Case:
        rows, capacity = lanes + 2, width + spare
        length = torch.randint(1, width + 1, (rows,), generator=generator)
        # A prefill leaves a window of one entry after L tokens; cycles only add to both.
        sequence = length + torch.randint(0, 3, (rows,), generator=generator)
        status = torch.randint(0, 2, (rows,), generator=generator)
        status[0] = LIVE
        live, entry = status == LIVE, torch.arange(capacity)
        window = torch.randn(rows, capacity, features, generator=generator)
        window[(entry >= length[:, None]) | ~live[:, None]] = torch.nan
        sequence[~live] = -(2**40)
        return {
            "lane_row_B": torch.randperm(rows, generator=generator)[:lanes],
            "status_R": status,
            "seq_len_R": sequence,
            "window_len_R": torch.where(live, length, -(2**40)),
            "window_token_RAc": torch.randint(0, 99, (rows, capacity), generator=generator),
            "window_feature_RAcF": window if features else None,
            "lookback_token_RY": torch.randint(0, 99, (rows, lookback), generator=generator) if lookback else None,
            "lookback_feature_RYF": torch.randn(rows, lookback, features, generator=generator) if lookback and features else None,
            "shift": shift,
            "width": width,
            "num_words": num_words,
        }

    return [
        case(1, 1, 1, 0, 1, 1),
        case(4, 6, 37, 0, 1, 1),
        case(3, 5, 130, 3, 0, 1),
        case(2, 4, 9, 2, 1, 2),
        case(3, 65, 0, 0, 0, 2),
        case(4, 5, 11, 0, 1, 1, spare=9),
        case(3, 4, 6, 2, 0, 1, spare=3),
    ]


def node_contexts(generator: Generator) -> list[Case]:
    def case(lanes: int, nodes: int, width: int) -> Case:
        rows = lanes + 2
        parent = torch.stack(
            [torch.tensor([-1, *(int(torch.randint(0, n, (1,), generator=generator)) for n in range(1, nodes))]) for _ in range(lanes)]
        )
        parent[-1, nodes - 1] = -1
        return {
            "recent_token_RBt": torch.randint(-1, 99, (rows, width), generator=generator),
            "lane_row_B": torch.randperm(rows, generator=generator)[:lanes],
            "node_token_BN": torch.randint(-1, 99, (lanes, nodes), generator=generator),
            "node_parent_BN": parent,
        }

    return [case(1, 1, 1), case(3, 9, 4), case(2, 5, 7), case(4, 17, 2), case(2, 3, 1)]


def note_tokens(generator: Generator) -> list[Case]:
    def case(lanes: int, nodes: int, length: int | None, width: int) -> Case:
        rows, most = lanes + 2, nodes if length is None else length
        return {
            "token_BN": torch.randint(0, 99, (lanes, nodes), generator=generator),
            "path_BA": None if length is None else torch.randint(0, nodes, (lanes, length), generator=generator),
            "count_B": torch.randint(0, most + 1, (lanes,), generator=generator),
            "lane_row_B": torch.randperm(rows, generator=generator)[:lanes],
            "recent_token_RBt": torch.randint(-1, 99, (rows, width), generator=generator),
        }

    return [case(1, 1, None, 1), case(3, 9, 4, 3), case(4, 5, 5, 9), case(2, 3, None, 2)]


def append_masks(generator: Generator) -> list[Case]:
    def case(lanes: int, width: int, features: int, masks: int, shift: int, num_words: int) -> Case:
        known = torch.randint(0, width + 1, (lanes,), generator=generator)
        known[0] = width
        unknown = torch.arange(width) >= known[:, None]
        return {
            "token_BA": torch.randint(0, 99, (lanes, width), generator=generator).masked_fill(unknown, -1),
            "feature_BAF": torch.randn(lanes, width, features, generator=generator).masked_fill(unknown[..., None], 0),
            "begin_B": torch.randint(-3, 2**40, (lanes,), generator=generator),
            "known_B": known,
            "mask_feature_F": torch.randn(features, generator=generator),
            "mask_token": 101,
            "masks": masks,
            "shift": shift,
            "num_words": num_words,
        }

    return [case(1, 1, 1, 0, 1, 1), case(4, 6, 37, 3, 1, 1), case(3, 60, 5, 7, 0, 2), case(2, 3, 130, 1, 0, 1)]


def mask_block(generator: Generator) -> list[Case]:
    def case(lanes: int, width: int, rows: int, steps: int, shift: int, num_words: int) -> Case:
        known = torch.randint(0, width + 1, (lanes,), generator=generator)
        known[0] = width
        return {
            "token_BA": torch.randint(0, 99, (lanes, width), generator=generator).masked_fill(torch.arange(width) >= known[:, None], -1),
            "known_B": known,
            "next_B": torch.randint(1, 2**40, (lanes,), generator=generator),
            "mask_token": 101,
            "rows": rows,
            "steps": steps,
            "shift": shift,
            "num_words": num_words,
        }

    return [case(1, 1, 1, 1, 1, 1), case(4, 6, 5, 4, 1, 1), case(3, 3, 65, 64, 0, 2), case(2, 8, 16, 3, 1, 2)]


def host_tree(generator: Generator) -> list[Case]:
    def case(lanes: int, nodes: int, capacity: int, trees_at: int) -> Case:
        rows, entries = lanes + 2, torch.arange(capacity)
        trees = torch.stack(
            (torch.randint(-1, 9, (lanes, capacity), generator=generator), (entries - 2).clamp(min=-1).expand(lanes, -1)), 1
        )
        mail = torch.randint(-(2**62), 2**62, (trees_at + lanes * 2 * capacity + 5,), generator=generator)
        mail[trees_at : trees_at + lanes * 2 * capacity] = trees.flatten()
        status = torch.randint(0, 2, (rows,), generator=generator)
        status[0] = LIVE
        return {
            "mail": mail,
            "trees_at": trees_at,
            "capacity": capacity,
            "lane_row_B": torch.randperm(rows, generator=generator)[:lanes],
            "status_R": status,
            "candidate_score_BM": torch.full((lanes, nodes), torch.nan),
            "candidate_token_BM": torch.zeros(lanes, nodes, dtype=torch.int64),
            "candidate_parent_BM": torch.zeros(lanes, nodes, dtype=torch.int64),
        }

    return [case(1, 1, 1, 0), case(4, 7, 7, 12), case(3, 2, 9, 3)]


def mail_apply(generator: Generator) -> list[Case]:
    def integers(minimum: int, maximum: int, *shape: int) -> Tensor:
        return torch.randint(minimum, maximum, shape, generator=generator)

    def case(lanes: int, rows: int, columns: int, updates: int, stops: int, groups: str = "", joins: int = 1, vocab: int = 70) -> Case:
        places = torch.randperm(rows * columns, generator=generator)[:updates]
        pages = torch.stack((places // columns, places % columns, integers(1, 1000, updates)), 1)
        bits = torch.randn(joins, JOIN_WORDS, generator=generator).view(torch.int32).long()
        join = integers(-(2**62), 2**62, joins, JOIN_WORDS)
        join[:, 0] = torch.randperm(rows, generator=generator)[:joins]
        for word in (3, 6, 7, 8, 9, 10):
            join[:, word] = bits[:, word]
        whole = torch.cat((join, integers(-1, 99, joins, stops)), 1)
        parts = (integers(0, rows, lanes + 1), integers(0, rows, rows), pages.flatten(), integers(0, 99, 4))
        at = [0, lanes + 1, lanes + 1 + rows, lanes + 1 + rows + 3 * updates]
        truncate, penalties = (group in groups for group in "tp")
        return {
            "mail": torch.cat((*parts, whole.flatten(), integers(0, 99, 5))),
            "lanes_at": at[0], "aborts_at": at[1], "pages_at": at[2], "pages_end": at[3],
            "joins_at": at[3] + 4, "joins": joins, "join_words": whole.shape[1],
            "lane_row_B": torch.full((lanes,), -(2**40)),
            "lane_table_BP": torch.full((lanes, columns), -(2**31), dtype=torch.int32),
            "lane_seed_B": torch.full((lanes,), -(2**40)), "lane_temperature_B": torch.full((lanes,), torch.nan),
            "status_R": integers(0, 5, rows), "budget_R": integers(0, 99, rows), "seed_R": integers(-99, 99, rows),
            "temperature_R": torch.rand(rows, generator=generator), "draft_len_R": integers(0, 9, rows),
            "stop_id_RE": integers(-1, 99, rows, stops), "page_table_RP": integers(0, 999, rows, columns).to(torch.int32),
            "top_k_R": integers(0, 9, rows) if truncate else None,
            **{name: torch.rand(rows, generator=generator) if truncate else None for name in ("top_p_R", "min_p_R")},
            **{n: torch.rand(rows, generator=generator) if penalties else None for n in ("repetition_R", "presence_R", "frequency_R")},
            "output_count_RV": integers(0, 9, rows, vocab).to(torch.int32) if penalties else None,
            "prompt_seen_RV": integers(0, 2, rows, vocab).to(torch.int8) if penalties else None,
        }  # fmt: skip

    return [
        case(1, 2, 1, 0, 1, joins=0),
        case(3, 5, 7, 9, 2, "tp"),
        case(2, 3, 130, 300, 4, "p", vocab=4099),
        case(4, 9, 17, 1, 8, "t"),
        case(4, 9, 3, 5, 2, "tp", joins=4, vocab=4099),
    ]


def marginal_pool(generator: Generator) -> list[Case]:
    def case(lanes: int, steps: int, topk: int) -> Case:
        increment = -torch.randint(0, 6, (lanes, steps, topk), generator=generator).sort(-1).values / 2
        increment[-1, -1, topk // 2 :] = -torch.inf
        increment[0, steps // 2, -1] = torch.nan
        status = torch.randint(0, 2, (lanes + 1,), generator=generator)
        status[0] = LIVE
        pool = topk + (steps - 1) * topk**2
        return {
            "increment_BSK": increment,
            "next_BSK": torch.randint(0, 50, (lanes, steps, topk), generator=generator),
            "lane_row_B": torch.randperm(lanes + 1, generator=generator)[:lanes],
            "status_R": status,
            "candidate_score_BM": torch.full((lanes, pool), torch.nan),
            "candidate_token_BM": torch.full((lanes, pool), -7_777),
            "candidate_parent_BM": torch.full((lanes, pool), -7_777),
        }

    return [case(1, 1, 1), case(3, 4, 3), case(2, 1, 8), case(4, 5, 1), case(2, 20, 7), case(1, 3, 33), case(3, 6, 8)]


def ngram_match(generator: Generator) -> list[Case]:
    def case(lanes: int, width: int, vocab: int, num_paths: int, depth: int, matches: tuple[int, int]) -> Case:
        rows, pool = lanes + 1, num_paths * depth
        sequence = torch.randint(0, width, (rows,), generator=generator)
        status = torch.randint(0, 3, (rows,), generator=generator).clamp(min=LIVE)
        row = torch.randperm(rows, generator=generator)[:lanes]
        sequence[row[0]], status[row[0]] = width - 1, LIVE
        sequence[status != LIVE] = -(2**40)
        history = torch.randint(0, vocab, (rows, width), generator=generator)
        history[torch.arange(width) > sequence[:, None]] = -(2**40)
        return {
            "history_RL": history,
            "lane_row_B": row,
            "status_R": status,
            "seq_len_R": sequence,
            "candidate_score_BM": torch.full((lanes, pool), torch.nan),
            "candidate_token_BM": torch.full((lanes, pool), -(2**40)),
            "candidate_parent_BM": torch.full((lanes, pool), -(2**40)),
            "num_paths": num_paths,
            "depth": depth,
            "min_match": matches[0],
            "max_match": matches[1],
        }

    empty = case(3, 9, 1, 2, 3, (2, 4))
    empty["seq_len_R"][empty["lane_row_B"]] = torch.tensor([2, 1, 0])
    empty["status_R"].fill_(LIVE)
    return [case(2, 40, 3, 3, 4, (1, 4)), case(3, 25, 2, 4, 3, (2, 3)), case(1, 1, 2, 1, 1, (1, 1)), case(5, 64, 4, 1, 6, (1, 80)), empty]


def forced_run(generator: Generator) -> list[Case]:
    def case(lanes: int, num_paths: int, depth: int) -> Case:
        """Random pools, whose entries hang below the path of their column, and runs that begin as one of them does."""
        pool, step_S = num_paths * depth, torch.arange(depth)
        token = torch.randint(0, 3, (lanes, depth, num_paths), generator=generator)
        parent = ((step_S[:, None] - 1) * num_paths + torch.arange(num_paths)).clamp(min=-1).expand(lanes, -1, -1).clone()
        parent[:, 0] = -1
        score = -torch.arange(float(pool)).view(depth, num_paths).expand(lanes, -1, -1).clone()
        forced = token[:, :, 0].clone()
        for lane in range(lanes):
            forced[lane, lane % (depth + 1) :] = -1
            forced[lane, :1] = torch.where(forced[lane, :1] >= 0, int(torch.randint(0, 3, (1,), generator=generator)), -1)
            token[lane, depth - 1 :, num_paths - 1], parent[lane, depth - 1 :, num_paths - 1] = -1, -1
            score[lane, depth - 1 :, num_paths - 1] = -torch.inf
        candidates = {"candidate_score_BM": score, "candidate_token_BM": token, "candidate_parent_BM": parent}
        return {"forced_BS": forced} | {name: slot.flatten(1) for name, slot in candidates.items()}

    return [case(1, 1, 1), case(5, 3, 4), case(4, 1, 3), case(7, 2, 6)]


def shard_topk(generator: Generator) -> list[Case]:
    def case(lanes: int, rows: int, columns: int, topk: int, absent: int, noisy: bool) -> Case:
        logits = torch.randn(lanes, rows, columns, generator=generator).mul(3).round(decimals=1)
        logits[0, 0, columns // 2 :] = torch.nan
        logits[-1, -1, 0] = torch.inf
        token = torch.arange(columns) + 3 * columns
        token[columns - absent :] = -1
        return {
            "logits_BTVr": logits,
            "topk": topk,
            "token_Vr": token,
            "temperature_B": torch.arange(lanes) * 0.7 if noisy else None,
            "seed_B": torch.randint(-(2**62), 2**62, (lanes,), generator=generator) if noisy else None,
            "position_BT": torch.randint(0, 5000, (lanes, rows), generator=generator) if noisy else None,
        }

    return [case(1, 1, 1, 1, 0, False), case(3, 2, 37, 4, 5, True), case(2, 3, 129, 8, 0, True), case(2, 1, 40, 20, 40, False)]


def take_last(generator: Generator) -> list[Case]:
    def case(lanes: int, entries: int, size: int) -> Case:
        known = torch.randint(0, entries + 1, (lanes,), generator=generator)
        hidden = torch.randn(lanes, entries, size, generator=generator)
        hidden[torch.arange(entries) > (known - 1).clamp(min=0)[:, None]] = torch.nan
        return {"hidden_BTH": hidden, "known_B": known, "out_BH": torch.full((lanes, size), torch.nan)}

    return [case(1, 1, 1), case(5, 6, 37), case(3, 2, 2049)]


def tree_build(generator: Generator) -> list[Case]:
    def case(lanes: int, num_steps: int, topk: int, num_nodes: int, num_words: int) -> Case:
        pool = candidate_pool(generator, lanes, num_steps, topk)
        return {**pool, **window_case(generator, lanes), **node_slots(lanes, num_nodes, num_words), "max_depth": num_steps}

    broken = case(3, 4, 3, 12, 1)
    broken["score_BM"][0, 1::3] = torch.nan
    broken["score_BM"][1, :] = -torch.inf
    broken["token_BM"][2, :4] = -1
    return [case(2, 1, 3, 4, 1), case(3, 5, 4, 16, 1), case(2, 5, 8, 65, 2), case(1, 3, 2, 1, 1), broken]


def tree_walk(generator: Generator) -> list[Case]:
    def case(lanes: int, num_steps: int, topk: int, num_nodes: int, num_words: int, accept_width: int, capped: bool = False) -> Case:
        def draw(low: int, high: int, *shape: int) -> Tensor:
            return torch.randint(low, high, shape, generator=generator)

        rows, vocab = lanes + 1, topk + 1
        pool = candidate_pool(generator, lanes, num_steps, topk, vocab=vocab)
        tree = build_tree(**pool, root_B=draw(0, vocab, lanes), num_nodes=num_nodes, num_words=num_words, max_depth=num_steps)
        stop = draw(0, 4 * topk, rows, 3)
        names = ("node_token_BN", "node_parent_BN", "node_depth_BN", "node_ancestors_BNX")
        return {
            **dict(zip(names, tree, strict=True)),
            "drawn_BN": draw(0, vocab, lanes, num_nodes),
            "finite_BN": draw(0, 12, lanes, num_nodes) > 0,
            "depth_cap_B": draw(0, num_steps + 1, lanes) if capped else None,
            "lane_row_B": torch.randperm(rows, generator=generator)[:lanes],
            "status_R": torch.where(draw(0, 5, rows) > 0, ROW_LIVE, draw(0, 5, rows)),
            "seq_len_R": draw(90, 103, rows),
            "draft_len_R": draw(0, num_steps + 2, rows),
            "budget_R": draw(0, 9, rows),
            "stop_id_RE": torch.where(stop > topk, -1, stop),
            "draft_context": 100,
            "sample_BN": torch.full((lanes, num_nodes), -7_777),
            "path_BA": torch.full((lanes, accept_width), -7_777),
            "accept_len_B": torch.full((lanes,), -7_777),
            "outcome_B": torch.full((lanes,), -7_777),
        }

    return [
        case(5, 3, 2, 8, 1, 4), case(7, 5, 3, 33, 1, 8), case(4, 3, 6, 70, 2, 4, True), case(3, 1, 1, 1, 1, 1),
        case(9, 4, 1, 5, 1, 5, True),
    ]  # fmt: skip


def verify_rows(generator: Generator) -> list[Case]:
    def case(lanes: int, nodes: int, words: int) -> Case:
        status = torch.randint(0, 3, (lanes + 1,), generator=generator)
        status[0] = LIVE
        return {
            "lane_row_B": torch.randperm(lanes + 1, generator=generator)[:lanes],
            "status_R": status,
            "seq_len_R": torch.randint(0, 2**40, (lanes + 1,), generator=generator),
            "node_token_BN": torch.randint(-2, 9, (lanes, nodes), generator=generator),
            "node_depth_BN": torch.randint(0, 7, (lanes, nodes), generator=generator),
            "node_ancestors_BNX": torch.randint(-(2**62), 2**62, (lanes, nodes, words), generator=generator),
        }

    return [case(1, 1, 1), case(3, 8, 1), case(2, 65, 2), case(5, 33, 1)]
