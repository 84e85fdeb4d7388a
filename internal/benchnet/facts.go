package main

import "time"

// Facts of the machine, without which a figure says little.
type facts struct {
	Time              time.Time `json:"time"`
	Ztun              string    `json:"ztun"`
	Kernel            string    `json:"kernel"`
	CPUs              int       `json:"cpus"`
	CPUModel          string    `json:"cpu_model"`
	CongestionControl string    `json:"congestion_control"`
	MTU               int       `json:"mtu"`
	Load              string    `json:"load"` // averages of 1, 5 and 15 minutes at the start
	Busy              float64   `json:"busy"` // share of CPU time that others used just before
	Warnings          []string  `json:"warnings"`
}
