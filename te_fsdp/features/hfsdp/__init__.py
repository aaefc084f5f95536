"""HFSDP: optimizer state sharded over dp_replicate as well.

    Optimizer
      MainParameters            features/main_params.py   hooks of its step
        .by_id[id(parameter)]
          MainParameter         optimizer_shards.py       parameter, main weight, version of the averaged gradient
            .shard  OptimizerShard                        this rank's rows, process group of the replicas
        .averages
          OuterAverages         gradients.py              averages of gradients over the replicas
            .early  EarlyAverages                         overlap.py: those that start during backward
              ._plan  _OverlapPlan                         one GradientAveraging for each unit
            ._averaging  GradientAveraging                overlap.py: the others, in the step
    ShardedModel
      ShardedOptimizer          gradients.py              component: refers to OuterAverages, hides .grad until then

    backward   after_reduction -> EarlyAverages.reduced -> GradientAveraging.start  reduce-scatter over dp_replicate
    step       OuterAverages.average -> main weights updated -> all_gather_main_params

[Note: main parameters in a step] in ``features/main_params.py`` describes the step.
"""
