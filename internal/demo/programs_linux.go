package demo

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os/exec"
	"strconv"
	"strings"
	"time"

	"ztun.dev/ztun/internal/lab"
)

// ownProgram is the name of the programs of this package in reports.
const ownProgram = "ztun's own"

// programs are what runs in the pods.
type programs struct {
	binary string // ztun
	curl   string // path; empty: ztun's own
	iperf3 string
}

func findPrograms(cfg *Config) programs {
	p := programs{binary: cfg.Binary}
	if !cfg.OwnClients {
		// Not found is no error: then it is our own.
		p.curl, _ = exec.LookPath("curl")
		p.iperf3, _ = exec.LookPath("iperf3")
	}
	return p
}

func (p *programs) httpClient() string {
	if p.curl == "" {
		return ownProgram
	}
	return "curl"
}

func (p *programs) throughputClient() string {
	if p.iperf3 == "" {
		return ownProgram
	}
	return "iperf3"
}

// requestTime limits a request, in seconds.
const requestTime = 3

// get asks for a URL from inside a host. shown is the command as a person would type it.
func (p *programs) get(ctx context.Context, host *lab.Host, family, url string) (g greeting, shown string, err error) {
	var cmd *lab.Cmd
	if p.curl == "" {
		shown = strings.Join([]string{"demo-client", family, "get", url}, " ")
		cmd = host.Command(ctx, p.binary, "demo-client", "-max-time", fmt.Sprint(requestTime*time.Second), family, "get", url)
	} else {
		shown = strings.Join([]string{"curl", family, url}, " ")
		cmd = host.Command(ctx, p.curl, "-q", "-sSf", "--noproxy", "*", "--max-time", strconv.Itoa(requestTime), family, url)
	}
	cmd.Env = environment
	out, err := cmd.Output()
	if err != nil {
		return g, shown, programError(err)
	}
	g, err = readGreeting(string(out))
	return g, shown, err
}

// programError is the last line of what a program said, where it said something.
func programError(err error) error {
	exit, ok := errors.AsType[*exec.ExitError](err)
	if !ok {
		return err
	}
	said := strings.Split(strings.TrimSpace(string(exit.Stderr)), "\n")
	if last := said[len(said)-1]; last != "" {
		return errors.New(last)
	}
	return err
}

// sinkCommand is the server of measurements.
func (p *programs) sinkCommand(ctx context.Context, host *lab.Host) *lab.Cmd {
	port := strconv.Itoa(sinkPort)
	if p.iperf3 == "" {
		return host.Command(ctx, p.binary, "demo-server", "-name", string(sink), "-sink", ":"+port)
	}
	return host.Command(ctx, p.iperf3, "-s", "-p", port)
}

// measure returns the throughput between a host and the sink at addr in Mbit/s.
func (p *programs) measure(ctx context.Context, host *lab.Host, addr string, down bool, d time.Duration) (float64, error) {
	ctx, cancel := context.WithTimeout(ctx, d+10*time.Second)
	defer cancel()
	if p.iperf3 == "" {
		args := []string{"demo-client", "-time", d.String(), "load", addr + ":" + strconv.Itoa(sinkPort)}
		if down {
			args = append([]string{"demo-client", "-down"}, args[1:]...)
		}
		cmd := host.Command(ctx, p.binary, args...)
		cmd.Env = environment
		out, err := cmd.Output()
		if err != nil {
			return 0, programError(err)
		}
		bits, err := strconv.ParseFloat(strings.TrimSpace(string(out)), 64)
		return bits / 1e6, err
	}
	args := []string{"-c", addr, "-p", strconv.Itoa(sinkPort), "-J", "-t", strconv.Itoa(max(1, int(d.Round(time.Second).Seconds())))}
	if down {
		args = append(args, "-R")
	}
	cmd := host.Command(ctx, p.iperf3, args...)
	cmd.Env = environment
	out, err := cmd.Output()
	bits, perr := iperf3Throughput(out)
	if perr != nil && err != nil {
		perr = fmt.Errorf("%w (%w)", perr, programError(err))
	}
	return bits / 1e6, perr
}

// crowd is how many connections are busy beside the round trips.
const crowd = 8

// pingPong measures round trips between a host and the sink at addr beside bulk connections. It is always ztun's own programs, each
// in its own process, so that none waits for another's threads.
func (p *programs) pingPong(ctx context.Context, host *lab.Host, addr netip.Addr, d time.Duration) (m PingPong, err error) {
	ctx, cancel := context.WithTimeout(ctx, 2*d+15*time.Second)
	defer cancel()
	at := func(port uint16) string { return netip.AddrPortFrom(addr, port).String() }
	var sent, said bytes.Buffer
	bulk := host.Command(ctx, p.binary, "demo-client", "-time", (d + d/2).String(), "-streams", strconv.Itoa(crowd), "load", at(crowdPort))
	bulk.Env, bulk.Stdout, bulk.Stderr = environment, &sent, &said
	if err := bulk.Start(); err != nil {
		return m, err
	}
	timer := time.NewTimer(d / 4) // until they are at full speed
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
	trips := host.Command(ctx, p.binary, "demo-client", "-time", d.String(), "pingpong", at(echoPort))
	trips.Env = environment
	out, tripsErr := trips.Output()
	if tripsErr != nil {
		tripsErr = programError(tripsErr)
	}
	if err := errors.Join(bulk.Wait(), tripsErr); err != nil {
		return m, fmt.Errorf("%w; %s", err, strings.TrimSpace(said.String()))
	}
	var p50, p99 int64
	if _, err := fmt.Sscan(string(out), &p50, &p99); err != nil {
		return m, fmt.Errorf("round trips: %q: %w", out, err)
	}
	sum, err := strconv.ParseFloat(strings.TrimSpace(sent.String()), 64)
	return PingPong{P50: float64(p50) / 1e6, P99: float64(p99) / 1e6, Streams: crowd, Bulk: sum / 1e6}, err
}

// iperf3Throughput is what the receiving side counted, in bits per second.
func iperf3Throughput(out []byte) (float64, error) {
	var result struct {
		Error string
		End   struct {
			SumReceived struct {
				BitsPerSecond float64 `json:"bits_per_second"`
			} `json:"sum_received"`
		}
	}
	switch err := json.Unmarshal(out, &result); {
	case err != nil:
		return 0, fmt.Errorf("iperf3: its answer: %w", err)
	case result.Error != "":
		return 0, fmt.Errorf("iperf3: %s", result.Error)
	case result.End.SumReceived.BitsPerSecond == 0:
		return 0, errors.New("iperf3: its answer names no throughput")
	}
	return result.End.SumReceived.BitsPerSecond, nil
}
