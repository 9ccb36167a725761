"""Ray clusters: a study is packaged, submitted as a job, kept alive on the head, and run on whichever nodes there are.

The way of a submitted study: `package` collects the spec, this package's code and the local files that the spec names;
`jobs` hands them to a cluster's job server; there `drive` runs the ordinary search and starts it again when it is
killed; `joined` is the cluster as that search sees it, and proves that every node reaches the study's folder. `doctor`
looks for what is misconfigured. Knows specs and records; nothing of training, sampling or strategies.
"""
